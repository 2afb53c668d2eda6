"""MiMo V2: folders as transformers writes them and as they are published, in place and converted,
and files as llama.cpp's converter writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_flash import run
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.models.load import load_config

N_LAYER = 4
_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_BASES = {"full_attention": 5e6, "sliding_attention": 1e4}
CASE = Case(
    "MiMoV2Flash",
    "mimo2",
    {
        "num_hidden_layers": N_LAYER,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 17,
        "layer_types": _KINDS,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.334}
            for kind, base in _BASES.items()
        },
    },
)
Saved = tuple[Path, np.ndarray]


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder that transformers has written, and its logits of ``ids_of()``."""
    folder = tmp_path_factory.mktemp("mimo") / "hf"
    return folder, compute_logits(save(own(CASE), folder), ids_of())


def test_in_every_way(mimo: Saved, tmp_path: Path) -> None:
    folder, expected = mimo
    made = convert(folder, tmp_path / "made.gguf")
    check_truth(made, expected)
    assert np.array_equal(run(folder), run(made))
    names_are_known(made, {"attn_q", "attn_sinks", "exp_probs_b", "ffn_up_exps"})
    with open_gguf(made) as file:
        config = load_config(file)
        found = [(at.mixer, at.n_head_kv, at.window, at.rope, at.ffn) for at in config.layers]
        assert found == [
            ("attention", 2, 0, 0, "gated"),
            ("attention_sinks", 4, 17, 1, "experts"),
            ("attention_sinks", 4, 17, 1, "experts"),
            ("attention", 2, 0, 0, "experts"),
        ]
        assert {(at.head_dim, at.head_dim_v) for at in config.layers} == {(48, 32)}
        assert [(rope.dims, rope.base) for rope in config.ropes] == [(16, 5e6), (16, 1e4)]
        assert config.value_scale == pytest.approx(0.707)
        assert reading_differences(file.metadata, file.tensors) == []


def test_cut_back_and_told_again(mimo: Saved) -> None:
    """Past the window."""
    folder, expected = mimo
    ids = ids_of()
    with treadle.load(folder, threads=2, kv="f32") as model, model.session() as session:
        session.logits(ids[:30])
        session.truncate(20)
        session.logits(ids[::-1][:5])
        session.truncate(20)
        error = np.abs(session.logits(ids[20:]) - expected[20:]).max()
        assert error <= 2 * rounding(model.config) * np.abs(expected).max()


# -- as folders are published -----------------------------------------------------------------


def publish(folder: Path, to: Path, more: Mapping[str, Any] | None = None) -> Path:
    """With the keys of MiMo-V2-Flash, and a layer that predicts further tokens."""
    from safetensors.numpy import load_file, save_file

    given = json.loads((folder / "config.json").read_text())
    ours = {"layer_types", "mlp_layer_types", "rope_parameters", "sliding_window", "rms_norm_eps"}
    config = {key: value for key, value in given.items() if key not in ours}
    config |= {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": given["rms_norm_eps"],
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "sliding_window": 16,
        "sliding_window_size": 16,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 48,
        "swa_v_head_dim": 32,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config | dict(more or {})))
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.attention_sink_bias" in tensors
    tensors["model.mtp.layers.0.eh_proj.weight"] = np.ones((64, 128), np.float32)
    save_file(tensors, to / "model.safetensors")
    return to


def test_as_it_is_published(mimo: Saved, tmp_path: Path) -> None:
    folder, _ = mimo
    assert np.array_equal(run(publish(folder, tmp_path / "hf")), run(folder))
    ours, theirs = (open_hf_source(at) for at in (folder, tmp_path / "hf"))
    names = {"general.name"}
    same = [{k: v for k, v in s.metadata.items() if k not in names} for s in (ours, theirs)]
    assert same[0] == same[1]
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert any("MTP layer" in note for note in theirs.notes)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"swa_head_dim": 64}, UnsupportedError, "swa_head_dim: is 64, and head_dim is 48"),
        ({"routed_scaling_factor": 2.5}, UnsupportedError, "routed_scaling_factor: is 2.5"),
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func: is 'softmax'"),
        ({"add_swa_attention_sink_bias": False}, UnsupportedError, "sink_bias: is False"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, UnsupportedError, "mlp_layer_types: .* first"),
        ({"hybrid_layer_pattern": [0, 1]}, FileError, "hybrid_layer_pattern: is"),
    ],
)
def test_what_is_refused(
    change: dict[str, Any], error: type[Exception], why: str, mimo: Saved, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        open_hf(publish(mimo[0], tmp_path / "hf", change))


# -- files of llama.cpp's converter ------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_files_of_its_converter(fused: bool, mimo: Saved, tmp_path: Path) -> None:
    """It writes keys for layers behind the last too, and of V2.5 one matrix for q, k and v."""
    made = convert(mimo[0], tmp_path / "made.gguf")
    theirs = tmp_path / "theirs.gguf"
    n_nextn = 3
    with open_gguf(made) as file:
        writer = GGUFWriter(theirs)
        metadata: dict[str, Any] = dict(file.metadata)
        del metadata["mimo2.leading_dense_block_count"]
        metadata["mimo2.block_count"] = N_LAYER + n_nextn
        metadata["mimo2.nextn_predict_layers"] = n_nextn
        heads = metadata["mimo2.attention.head_count_kv"]
        metadata["mimo2.attention.head_count_kv"] = [*heads, *[4] * n_nextn]
        metadata["mimo2.attention.sliding_window_pattern"] = [0, 1, 1, 0, *[1] * n_nextn]
        for key, value in metadata.items():
            writer.add(key, value)
        for name, tensor in file.tensors.items():
            rows = tensor.dequantize()
            if fused and name.endswith(("attn_k.weight", "attn_v.weight")):
                continue
            if fused and name.endswith("attn_q.weight"):
                parts = (file.tensors[name.replace("_q", f"_{x}")].dequantize() for x in "qkv")
                rows = np.concatenate(list(parts))
                name = name.replace("_q", "_qkv")
            writer.add_tensor(name, rows.shape, "F32", rows)
        for i in range(N_LAYER, N_LAYER + n_nextn):
            rows = np.ones((64, 128), np.float32)
            writer.add_tensor(f"blk.{i}.nextn.eh_proj.weight", rows.shape, "F32", rows)
        writer.write()
    assert np.array_equal(run(theirs), run(made))


def test_sinks_that_are_not_there(mimo: Saved, tmp_path: Path) -> None:
    with open_gguf(convert(mimo[0], tmp_path / "made.gguf")) as file:
        del file.tensors["blk.2.attn_sinks.weight"]
        with pytest.raises(FileError, match=r"blk\.2\.attn_sinks\.weight: the tensor is missing"):
            load_config(file)
