"""The making of a batch: prompts in, scored samples out."""
