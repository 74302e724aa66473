"""What stands on a backbone: logits and logprobs, values, classes."""
