"""A recorded step of a run, taken apart in one process."""
