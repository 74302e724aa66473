"""Measurements against other libraries; see README.md."""
