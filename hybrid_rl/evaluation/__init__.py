"""Statistics of evaluations: shares of solved prompts, votes, intervals, paired tests."""
