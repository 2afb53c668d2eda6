"""Families with layers of Mamba-1: as ``test_hf_mixtures`` has it, and each key's value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.models.graphs.recurrence import PARTS_EPS, PARTS_NORM

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


@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "jamba"])
def test_in_every_way(name: str, tmp_path: Path) -> None:
    """Against transformers: in one go, in chunks, and the same bits for any number of threads."""
    model = save(own(CASES[name]), tmp_path / "hf")
    check_truth(convert(tmp_path / "hf", tmp_path / "made.gguf"), compute_logits(model, ids_of()))


@pytest.mark.parametrize("name", CASES)
def test_names_of_tensors(name: str, tmp_path: Path) -> None:
    """Those that the gguf package lists."""
    gguf = pytest.importorskip("gguf")
    case = own(CASES[name])
    arch = next(a for a, written in gguf.MODEL_ARCH_NAMES.items() if written == case.arch)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    save(case, tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        for tensor in file.tensors:
            stem = re.sub(r"\.(weight|bias)$", "", re.sub(r"^blk\.\d+", "blk.{bid}", tensor))
            assert stem in known, tensor


# -- config.json --------------------------------------------------------------------------------

_SIZES = {"hidden_size": 72, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 320}


def read(kind: str, **given: Any) -> dict[str, Any]:
    hyper = read_config({"model_type": kind, **_SIZES, **given}, Path("config.json"))
    arch = hyper.metadata.pop("general.architecture")
    return {key.removeprefix(f"{arch}."): value for key, value in hyper.metadata.items()}


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("mamba", "time_step_rank"), ("falcon_mamba", "time_step_rank"), ("jamba", "mamba_dt_rank")],
)
def test_what_steps_are_made_of(kind: str, rank: str) -> None:
    """A sixteenth of the model's width, rounded up, where no number is given."""
    for value in ("auto", None):
        assert read(kind, **{rank: value})["ssm.time_step_rank"] == 5
    assert read(kind, **{rank: 7})["ssm.time_step_rank"] == 7


def test_widths_of_states() -> None:
    assert read("mamba")["ssm.inner_size"] == 144
    assert read("mamba", expand=3)["ssm.inner_size"] == 216
    assert read("mamba", expand=3, intermediate_size=144)["ssm.inner_size"] == 144
    assert read("jamba", mamba_expand=1)["ssm.inner_size"] == 72


def test_epsilons_of_falcon() -> None:
    """A key of treadle's own, where the norms of dt, B and C have another one."""
    assert read("falcon_mamba")[PARTS_EPS] == pytest.approx(1e-6)
    assert PARTS_EPS not in read("falcon_mamba", mixer_rms_eps=1e-5)
    assert (read("falcon_mamba")[PARTS_NORM], read("mamba")[PARTS_NORM]) == (True, False)


def test_layers_with_attention() -> None:
    found = read("jamba", attn_layer_period=3, attn_layer_offset=1, num_key_value_heads=2)
    assert found["attention.head_count_kv"] == [0, 2, 0, 0, 2]
    with pytest.raises(FileError, match="attn_layer_offset: is 3"):
        read("jamba", attn_layer_period=3, attn_layer_offset=3)
