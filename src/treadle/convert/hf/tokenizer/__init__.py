"""Tokenizers of checkpoints in GGUF's form."""
