"""Family row of Baichuan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.metadata import MetadataReader


def _third(rows: Rows, i: int) -> Rows:
    """Return the i-th third of the rows of a fused qkv matrix: 0 queries, 1 keys, 2 values."""
    n = rows.shape[0] // 3
    if rows.shape[0] != 3 * n:
        raise ValueError("three matrices of one size")
    return rows[i * n : (i + 1) * n]


def _unit_rows(rows: Rows) -> Rows:
    """Normalise each row to length 1, as ``torch.nn.functional.normalize`` does."""
    length = np.sqrt(np.square(rows, dtype=np.float64).sum(-1, keepdims=True))
    return np.asarray(rows / np.maximum(length, 1e-12), np.float32)


def _packed(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that split Baichuan's fused qkv; for Baichuan 2 also one that normalises the
    rows of its output matrix.
    """
    gives = {f"self_attn.{x}_proj.weight": partial(_third, i=i) for i, x in enumerate("qkv")}
    rules = [DerivationRule(("self_attn.W_pack.weight",), gives, side="B")]
    if keys.has("z_loss_weight") or keys.integer("vocab_size") == _BAICHUAN2_VOCAB:
        rules.append(
            DerivationRule(("lm_head.weight",), {"lm_head.weight": _unit_rows}, floats=True)
        )
    return rules


_BAICHUAN2_VOCAB = 125696

BAICHUAN_FAMILIES: dict[str, Family] = {
    "baichuan": Family(
        "baichuan",
        {**COMMON, "vocab_size": 64000, "max_position_embeddings": 4096},
        derived=_packed,
    ),
}
