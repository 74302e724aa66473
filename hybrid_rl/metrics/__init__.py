"""Numbers of a run: sums that join over ranks, timers; and the statistics of evaluations."""
