"""Prompts: their sources, their encoding as tokens, the order of their use; and splitting samples by length or cost."""
