"""The embedded engine over a paged cache."""
