"""The built-in task, tokenizer, model and supervised warm start behind `make run`."""
