"""The built-in tasks of agents: sums with a calculator, and a game of several turns."""
