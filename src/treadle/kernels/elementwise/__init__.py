"""Kernels of one pass over rows: embeddings, norms, gates, softcaps, the top logits."""
