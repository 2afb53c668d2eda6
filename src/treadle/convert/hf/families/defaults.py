"""transformers' defaults that many families share."""

from __future__ import annotations

COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
COMMON_EPS_5 = {**COMMON, "rms_norm_eps": 1e-5}
# config.json's own name for the epsilon of norms
LAYER_NORM = {"rms_norm_eps": "layer_norm_eps"}
