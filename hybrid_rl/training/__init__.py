"""Training arithmetic: losses over micro-batches, plans, optimizers and scores."""
