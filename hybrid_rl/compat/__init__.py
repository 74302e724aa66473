"""Private names of other libraries, one file per library: what each is needed for, and the versions it was tried with.

Nothing else in the package uses a private name of torch, transformers, Ray or vLLM, so a release that moves one breaks
one file here, and a test of that name fails first.
"""
