"""Older checkpoint formats: ggml's, llama2.c's and Meta's."""
