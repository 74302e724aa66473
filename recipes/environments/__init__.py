"""Ready-made tools and environments to try agents with, and to copy from."""
