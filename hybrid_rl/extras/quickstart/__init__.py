"""The built-in task, tokenizer, model and supervised warm start of `make run`."""
