"""A look at data before a run."""
