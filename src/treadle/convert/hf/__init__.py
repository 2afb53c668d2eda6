"""Checkpoints of Hugging Face: configuration, tensors and tokenizer as GGUF has them."""
