"""Checkpoints: a folder that `from_pretrained` reads, with the rest of the training state next to the weights.

A checkpoint appears whole or not at all: it is written under another name and renamed when it is complete. Its manifest
has a hash of every file, so that damage is reported instead of trained on.
"""
