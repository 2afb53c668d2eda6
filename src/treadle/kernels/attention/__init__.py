"""Attention over pages of keys and values, rotary positions, latent attention."""
