"""Measurements against other libraries, described in README.md."""
