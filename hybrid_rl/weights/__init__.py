"""Weights in and out of modules, plain or sharded, without a full model in any process."""
