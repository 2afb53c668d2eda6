"""Family row of Granite's MoE with a shared expert."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.convert.hf.families.mixtures import (
    GRANITE,
    GRANITE_DEFAULTS,
    GRANITE_EXPERTS,
    GRANITE_SCALES,
    gate_and_up,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.keys import MetadataReader

_NAMES: Names = {
    **GRANITE,
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    shared = gate_and_up("shared_mlp.input_linear", "shared_mlp.gate", "shared_mlp.up")
    return GRANITE_EXPERTS, shared


GRANITE_SHARED: dict[str, Family] = {
    "granitemoeshared": Family(
        "granitemoe",
        {**GRANITE_DEFAULTS, "shared_intermediate_size": 0},
        _NAMES,
        copied=GRANITE_SCALES,
        experts=True,
        derived=_rules,
    )
}
