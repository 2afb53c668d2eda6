"""Family rows of Gemma 1 to 3, and of VaultGemma."""

from __future__ import annotations

from dataclasses import replace

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import GELU_TANH, Family
from treadle.convert.hf.tensor_names import POST_NORMS
from treadle.convert.hf.windows import all_but_every
from treadle.files.metadata import MetadataReader

_GEMMA1 = {
    **COMMON,
    "vocab_size": 256000,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_GEMMA1,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = Family(
    "gemma3",
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    POST_NORMS,
    activation=GELU_TANH,
    norm_shift=1.0,
    windowed=all_but_every(6, overridable=True),
    own_local_rope=True,
)
_GEMMA_EMBEDDING = replace(
    _GEMMA3, arch="gemma-embedding", only={"use_bidirectional_attention": True}
)


def _gemma3(keys: MetadataReader) -> Family | None:
    return _GEMMA_EMBEDDING if keys.flag("use_bidirectional_attention", False) else None


GEMMA_FAMILIES: dict[str, Family] = {
    "gemma": Family(
        "gemma", _GEMMA1, activation=GELU_TANH, older_activation="gelu", norm_shift=1.0
    ),
    "gemma2": Family(
        "gemma2",
        _GEMMA2,
        POST_NORMS,
        activation=GELU_TANH,
        norm_shift=1.0,
        windowed=all_but_every(2),
    ),
    "gemma3_text": replace(_GEMMA3, variant=_gemma3),
}

GEMMA_FAMILIES |= {
    "vaultgemma": replace(GEMMA_FAMILIES["gemma2"], arch="vaultgemma"),
}

# Rows that ``variant`` chooses.
GEMMA_VARIANTS = (_GEMMA_EMBEDDING,)
