"""Preparation and start of a run: arguments, checks, models, worker groups."""
