"""Weight layouts and the handoff of weights to rollout engines."""
