"""Older formats of checkpoints: ggml's, llama2.c's and Meta's."""
