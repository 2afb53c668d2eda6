"""HRM-Text: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.active_parameters import active
from treadle.models.load import load_config
from treadle.models.stages import staged

N = 2  # layers of a stack
SIZES = {"num_hidden_layers": N, "head_dim": 32, "H_cycles": 2, "L_cycles": 2, "pad_token_id": 0}
# Tensors of a layer that llama.cpp's loader requires.
NAMES = "attn_q attn_k attn_v attn_gate attn_output ffn_gate ffn_down ffn_up"


def saved(folder: Path, width: int = 128) -> np.ndarray:
    """Write a folder; return transformers' logits. Rows of 64 values are padded."""
    case = Case("HrmText", "hrm_text", {**SIZES, "hidden_size": width})
    return compute_logits(save(case, folder), ids_of())


def test_in_every_way(tmp_path: Path) -> None:
    truth = saved(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    check_returns(made)
    with open_gguf(made) as file:
        layers = {name for name in file.tensors if name.startswith("blk.")}
        assert layers == {f"blk.{i}.{x}.weight" for i in range(2 * N) for x in NAMES.split()}
        assert "hrm.z_l_init" in file.tensors
        keys = {key.partition(".")[2]: value for key, value in file.metadata.items()}
        assert keys["block_count"] == N * 2 * 3
        assert (keys["hrm.layers_per_stack"], keys["hrm.h_cycles"], keys["hrm.l_cycles"]) == (
            N,
            2,
            2,
        )
        assert keys["embedding_scale"] == 50.0
        config = load_config(file)
        assert config.weights_of == (0, 1, 0, 1, 2, 3) * 2
        sizes = {name: tensor.n_bytes for name, tensor in file.tensors.items()}
        low = sum(n for name, n in sizes.items() if name.startswith(("blk.0.", "blk.1.")))
        others = sum(n for name, n in sizes.items() if name not in layers)
        embd = sizes["token_embd.weight"]
        row = embd // 320
        assert active(file, config).n_bytes == 4 * low + 2 * low + others - embd + row
        with pytest.raises(UnsupportedError, match="cannot be split into stages"):
            staged(config, range(3))


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    truth = saved(tmp_path / "hf")
    check_instruction_set(
        convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, PORTABLE
    )


@pytest.mark.slow
def test_other_spellings(tmp_path: Path) -> None:
    """Matrices apart, as its classes have them, and the number of a stack's layers alone."""
    from safetensors.numpy import load_file, save_file

    truth = saved(tmp_path, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == N * 2 * 3
    config["num_hidden_layers"] = config.pop("num_layers_per_stack")
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    apart: dict[str, np.ndarray] = {}
    for name, rows in load_file(path).items():
        layer, _, stem = name.rpartition(".attn.")
        if stem == "gqkv_proj.weight":
            parts = zip(("gate", "q", "k", "v"), np.split(rows, 4), strict=True)
            apart |= {f"{layer}.self_attn.{x}_proj.weight": part.copy() for x, part in parts}
        elif name.endswith("gate_up_proj.weight"):
            parts = zip(("gate", "up"), np.split(rows, 2), strict=True)
            apart |= {name.replace("gate_up", x): part.copy() for x, part in parts}
        else:
            apart[name.replace(".attn.", ".self_attn.")] = rows
    save_file(apart, path)
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attention_bias": True}, "attention_bias: is True: treadle supports only False"),
        ({"H_cycles": 0}, "H_cycles: is 0"),
        ({"num_layers_per_stack": "x"}, "num_layers_per_stack: is 'x'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    read_config({"model_type": "hrm_text"}, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({"model_type": "hrm_text", **change}, Path("config.json"))


def test_bad_files(tmp_path: Path) -> None:
    saved(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        plain = dict(file.metadata)
        file.metadata = {**plain, "hrm_text.hrm.h_cycles": 3}
        with pytest.raises(FileError, match=r"block_count: is 12 .*18: 2 a stack, 2 times low"):
            load_config(file)
        file.metadata = {**plain, "hrm_text.hrm.l_cycles": 0}
        with pytest.raises(FileError, match=r"hrm\.l_cycles: is 0"):
            load_config(file)
