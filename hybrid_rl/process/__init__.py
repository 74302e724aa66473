"""What a process needs: interrupts, heartbeat, threads and child processes that run calls, files, hooks of extras."""
