"""The pictures of a run: curves.png and memory.png."""
