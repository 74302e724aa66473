"""State of this process: interrupts, heartbeat and threads."""
