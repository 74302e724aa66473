"""Mixtures of experts: routing, and the balance of their load."""
