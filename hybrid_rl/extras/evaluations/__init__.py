"""Evaluations outside of a run: of a checkpoint, kept in a file, and compared with others."""
