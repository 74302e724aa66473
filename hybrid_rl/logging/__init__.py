"""Run folder, console and progress display."""
