"""Sources of weights: the transports from trainer ranks to engines."""
