"""Run folder, console, progress display and trackers."""
