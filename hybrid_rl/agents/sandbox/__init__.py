"""The sandbox of programs that the policy writes: one process that starts them, and what the kernel lets them do."""
