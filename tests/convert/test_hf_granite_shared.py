"""Granite's mixture with an expert that every token has, in place and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.files.gguf import open_gguf

CASE = Case(
    "GraniteMoeShared",
    "granitemoe",
    {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
)


def save_granite(folder: Path) -> Any:
    return save(own(CASE), folder)


@pytest.mark.parametrize("width", [64, 0])
def test_in_place_and_converted(width: int, tmp_path: Path) -> None:
    made = check_both(own(CASE, shared_intermediate_size=width), tmp_path)
    names_are_known(made, {"ffn_up_shexp"} if width else {"ffn_up_exps"})
    with open_gguf(made) as file:
        assert ("blk.0.ffn_up_shexp.weight" in file.tensors) == (width > 0)


def test_in_every_way(tmp_path: Path) -> None:
    model = save_granite(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))
