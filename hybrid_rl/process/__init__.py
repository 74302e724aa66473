"""State of this process: interrupts and heartbeat."""
