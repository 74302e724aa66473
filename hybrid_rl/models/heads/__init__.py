"""Heads of a backbone: logits and logprobs, values."""
