"""State of this process: interrupts, heartbeat, threads and child processes that run calls."""
