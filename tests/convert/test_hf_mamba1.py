"""Families with layers of Mamba-1: as ``test_hf_mixtures`` has it, and each key's value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from treadle.files.gguf import open_gguf

_JAMBA = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 3,
    "expert_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 12,
}
_MAMBA = {"num_hidden_layers": 3, "intermediate_size": 128, "time_step_rank": 12}
CASES: dict[str, Case] = {
    "mamba": Case("Mamba", "mamba", _MAMBA),
    "mamba-tied": Case(
        "Mamba", "mamba", {**_MAMBA, "tie_word_embeddings": True, "time_step_rank": "auto"}
    ),
    "mamba-biases": Case("Mamba", "mamba", {**_MAMBA, "use_bias": True, "use_conv_bias": False}),
    "falcon-mamba": Case("FalconMamba", "mamba", {**_MAMBA, "mixer_rms_eps": 0.01}),
    "jamba": Case("Jamba", "jamba", _JAMBA),
    "jamba-dense": Case("Jamba", "jamba", {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1}),
    "jamba-biases": Case(
        "Jamba", "jamba", {**_JAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path) -> None:
    with open_gguf(check_both(own(CASES[name]), tmp_path)) as made:
        assert made.metadata["general.architecture"] == CASES[name].arch
