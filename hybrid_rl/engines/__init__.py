"""Engines that make completions, and the contract they keep."""
