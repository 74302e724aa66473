"""Sleep and wake of whatever occupies memory, and measurement of memory in use."""
