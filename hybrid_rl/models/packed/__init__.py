"""Models that run packed rows, and their checks at the start."""
