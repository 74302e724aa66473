"""The engine over a model's own forward and the caches of transformers."""
