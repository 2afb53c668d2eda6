"""Phi's mixtures of experts: folders, in place and converted, against transformers; and files as
llama.cpp's converter writes them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.2, 1.3, 1.3, 1.4],
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
}
CASE = Case(
    "Phimoe",
    "phimoe",
    {
        "num_local_experts": 8,
        "router_jitter_noise": 0.2,  # so many that several are near the best
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": LONG,
    },
)
BIASES = "attn_output.bias", "attn_norm.bias", "ffn_norm.bias", "attn_k.bias"


def changed(folder: Path, **keys: Any) -> Path:
    """The folder of the case with other keys."""
    save(own(CASE), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def test_in_every_way(tmp_path: Path) -> None:
    model = save(own(CASE), tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    names_are_known(made, {"attn_q", "ffn_gate_inp", "ffn_gate_exps"})
    check_truth(made, compute_logits(model, ids_of()))
    with open_gguf(made) as file:
        assert {f"blk.3.{name}" for name in BIASES} | {"output.bias"} <= file.tensors.keys()


@pytest.mark.parametrize(
    "more",
    [
        # What most tokens meet: one expert is near, twice, and weighs all.
        {"router_jitter_noise": 0.01, "rope_parameters": {"rope_type": "default"}},
        {"attention_bias": False, "lm_head_bias": False, "sliding_window": 16, "head_dim": 32},
    ],
)
def test_in_place_and_converted(more: dict[str, Any], tmp_path: Path) -> None:
    factors = [*LONG["short_factor"], *LONG["long_factor"]]
    if "head_dim" in more:
        rope = {**LONG, "short_factor": factors, "long_factor": factors}
        more = {**more, "rope_parameters": rope}
    made = check_both(own(CASE, **more), tmp_path)
    with open_gguf(made) as file:
        (window,) = {layer.window for layer in load_config(file).layers}
    assert window == more.get("sliding_window", 0)


@pytest.mark.filterwarnings("ignore:with a context over .* long rope factors")
def test_the_longer_factors(tmp_path: Path) -> None:
    """Of contexts over the original one, as in the model's own code: transformers computes with the
    shorter ones whatever the length.
    """
    rope = {**LONG, "original_max_position_embeddings": 32}
    model = save(own(CASE, rope_parameters=rope), tmp_path / "hf")
    model.config.rope_parameters["short_factor"] = LONG["long_factor"]
    check_truth(convert(tmp_path / "hf", tmp_path / "made.gguf"), compute_logits(model, ids_of()))


def test_as_llama_cpp_writes_it(tmp_path: Path) -> None:
    """The model's own factor and jitter, which no key of such a file says."""
    rope = {**LONG, "original_max_position_embeddings": 4096}
    keys = {"max_position_embeddings": 131072, "rope_parameters": rope, "router_jitter_noise": 0.01}
    made = convert(changed(tmp_path / "hf", **keys), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        config = load_config(file)
        assert config.ropes[0].attn_factor == 1.25
        phi3 = math.sqrt(1 + math.log(32) / math.log(4096))
        key = "phimoe.rope.scaling.attn_factor"
        unsaid = "phimoe.router_jitter_noise"
        said = {name: it for name, it in file.metadata.items() if name != unsaid}
        file.metadata = {**said, key: float(np.float32(phi3))}
        config = load_config(file)
    assert config.ropes[0].attn_factor == 1.243163121016122
    assert config.norm_eps == np.float32(1e-5)
    assert {layer.experts.jitter for layer in config.layers if layer.experts} == {0.01}


def test_what_llama_cpp_computes_otherwise(tmp_path: Path) -> None:
    made = convert(changed(tmp_path / "hf"), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
        assert "in phimoe its norms are RMS norms" in note
        bare = [name for name in file.tensors if not name.endswith("output.bias")]
        note, _ = reading_differences(file.metadata, bare)
    assert note.endswith("it refuses phimoe without attn_output.bias, output.bias")


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("keys", "kind", "why"),
    [
        ({"num_experts_per_tok": 3}, UnsupportedError, "num_experts_per_tok: is 3"),
        ({"router_jitter_noise": 0.0}, FileError, "router_jitter_noise: is 0.0"),
        ({"rope_parameters": LINEAR}, UnsupportedError, "rope_type: 'linear'"),
        ({"rope_parameters": {**LONG, "long_mscale": 1.5}}, UnsupportedError, "mscale: is 1.5"),
        ({"rope_parameters": {**LONG, "long_mscale": None}}, FileError, "mscale: is missing"),
    ],
)
def test_what_is_refused(
    keys: dict[str, Any], kind: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=why):
        open_hf(changed(tmp_path, **keys))


def test_steps_of_a_plan(tmp_path: Path) -> None:
    save(own(CASE), tmp_path)
    with treadle.load(tmp_path, threads=1) as model:
        labels = [step.label for step in model.plan(1).match("L0.ffn.*")]
    assert labels[:3] == ["L0.ffn.norm", "L0.ffn.router", "L0.ffn.route"]
