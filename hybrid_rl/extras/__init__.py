"""What is not on the way from prompt to weights: the core knows of it by `process/hooks.py` alone."""
