"""Hugging Face checkpoints: configuration, tensors and tokenizer in GGUF's form."""
