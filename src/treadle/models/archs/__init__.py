"""Architectures by GGUF name: each is a row (``models/arch.py``) with a graph's name and traits.

::

    decoders.py  dense decoders
    mixtures.py  decoders with experts
    states.py    models with recurrent layers
    encoders.py  encoders, and encoder-decoder models

A trait states a difference from Llama's data flow. Two kinds of differences are not traits: those
that a tensor's presence shows (biases, q/k norms, norms after the products, fused matrices, tied
output, rope factors: optional rows of ``models/mixers`` and ``models/ffns``), and those that a key
states, such as experts.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from treadle.models.arch import (
    ALIBI,
    BUCKETS,
    DISTANCES,
    EMBD_NORMED,
    EXPERTS_GATING,
    EXPERTS_JITTER,
    EXPERTS_MEAN,
    EXPERTS_NORM,
    EXPERTS_ROUTED,
    GATE,
    GATE_LIMITED,
    INDEX_HALVED,
    LEADING_DENSE,
    LOCAL_BASE,
    LORA_A,
    LORA_B,
    N_BUCKETS,
    N_OWN,
    PATTERN,
    POST_EPS,
    QK_NORM,
    QKV_BIAS,
    REACH,
    ROPE_HALVED,
    ROPE_PATTERN,
    ROPE_SECTIONED,
    ROPES,
    SWITCHED_MATRICES,
    TEMPERATURE,
    TEMPERATURE_LENGTH,
    TYPES,
    VALUE_NORMED,
    WINDOW,
    YARN_TRUNCATE,
    Arch,
)
from treadle.models.archs.decoders import DECODERS
from treadle.models.archs.encoders import ENCODER_DECODERS, ENCODERS
from treadle.models.archs.mixtures import MIXTURES
from treadle.models.archs.states import STATES
from treadle.models.structure import LazyConstants

_TABLES = DECODERS, MIXTURES, STATES, ENCODER_DECODERS, ENCODERS
ARCHS = LazyConstants[Arch](__name__, {arch.name: arch for table in _TABLES for arch in table}, {})
_DSPARK_STREAMS = replace(  # DSpark of DeepSeek V4
    ARCHS["deepseek4"],
    name="dflash",
    graph="dspark_streams",
    needs=frozenset({"enc.output_norm.weight"}),
    lacks=ARCHS["dflash"].lacks,
    nextn="",
)
# By architecture: a key, and the row for files that have this key.
WITH_KEY = {"dflash": ("dflash.hyper_connection.count", _DSPARK_STREAMS)}
# Graphs of models that only draft for another one.
DRAFTER_GRAPHS = ("assistant", "eagle3", "dflash", "dspark_streams")
STANDALONE = [name for name, arch in ARCHS.items() if arch.graph not in DRAFTER_GRAPHS]


def row_of(name: str, metadata: Container[str]) -> Arch:
    """Return the row of the architecture ``name`` for a file with the keys ``metadata``. In a few
    architectures the presence of one key selects another row (``WITH_KEY``).
    """
    key, other = WITH_KEY.get(name, ("", None))
    return other if other is not None and key in metadata else ARCHS[name]


__all__ = [
    "ALIBI",
    "ARCHS",
    "BUCKETS",
    "DISTANCES",
    "DRAFTER_GRAPHS",
    "EMBD_NORMED",
    "EXPERTS_GATING",
    "EXPERTS_JITTER",
    "EXPERTS_MEAN",
    "EXPERTS_NORM",
    "EXPERTS_ROUTED",
    "GATE",
    "GATE_LIMITED",
    "INDEX_HALVED",
    "LEADING_DENSE",
    "LOCAL_BASE",
    "LORA_A",
    "LORA_B",
    "N_BUCKETS",
    "N_OWN",
    "PATTERN",
    "POST_EPS",
    "QKV_BIAS",
    "QK_NORM",
    "REACH",
    "ROPES",
    "ROPE_HALVED",
    "ROPE_PATTERN",
    "ROPE_SECTIONED",
    "STANDALONE",
    "SWITCHED_MATRICES",
    "TEMPERATURE",
    "TEMPERATURE_LENGTH",
    "TYPES",
    "VALUE_NORMED",
    "WINDOW",
    "WITH_KEY",
    "YARN_TRUNCATE",
    "Arch",
    "row_of",
]
