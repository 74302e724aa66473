"""Low-rank adapters by peft inside a Hugging Face module, and the module without them."""
