"""Agents: policies that act over many turns, with tools and environments."""
