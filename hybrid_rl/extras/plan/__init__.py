"""The plan of a run for people: its memory by phase, its handoff by link, an estimate of its time."""
