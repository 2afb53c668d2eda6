"""Speculative decoding: n-grams, draft models and multi-token prediction."""
