"""Families with layers that keep a state: as ``test_hf_mixtures`` has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.test_hf_mixtures import check, own
from tests.models.hf_cases import Case
from treadle.convert.hf.families.lfm2 import _conv_keys, _dense_width
from treadle.errors import FileError
from treadle.files.metadata import MetadataReader

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-5}
_DELTA = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}

CASES: dict[str, Case] = {
    "lfm2": Case("Lfm2", "lfm2", {**_CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": Case(
        "Lfm2Moe",
        "lfm2moe",
        {**_CONV, **_EXPERTS, "num_dense_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen35": Case("Qwen3_5", "qwen35", _DELTA),
    "qwen35moe": Case("Qwen3_5Moe", "qwen35moe", {**_DELTA, **_SHARED}),
    "qwen3next": Case("Qwen3Next", "qwen3next", {**_DELTA, **_SHARED}),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path, data: Path) -> None:
    check(name, own(CASES[name]), tmp_path, data)


def test_the_width_of_lfm2() -> None:
    """LFM2-1.2B says 12288 and has 8192; without the rounding it has what it says."""
    given = {"block_ff_dim": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    assert _dense_width(MetadataReader(given, Path("config.json"))) == 8192
    assert (
        _dense_width(MetadataReader({**given, "block_auto_adjust_ff_dim": False}, Path("x")))
        == 12288
    )
    assert _dense_width(MetadataReader({**given, "block_ff_dim": 7000}, Path("x"))) == 4864


def test_which_layers_of_lfm2_have_attention() -> None:
    """Older files list them by number; where nothing is said, all have it."""

    def heads(**given: object) -> list[int]:
        keys = MetadataReader({"num_key_value_heads": 2, **given}, Path("config.json"))
        found: list[int] = _conv_keys(keys, 4)["attention.head_count_kv"]
        return found

    assert heads(full_attn_idxs=[0, 2]) == [2, 0, 2, 0]
    assert heads() == [2] * 4
    for key, wrong in (("full_attn_idxs", 3), ("full_attn_idxs", ["0"]), ("layer_types", [])):
        with pytest.raises(FileError, match=key):
            heads(**{key: wrong})
