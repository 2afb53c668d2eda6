"""Tokenizers of checkpoints, as GGUF has them."""
