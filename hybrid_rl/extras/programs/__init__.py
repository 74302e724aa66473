"""Programs that the policy writes: as calls of a tool, and as completions that are graded by tests."""
