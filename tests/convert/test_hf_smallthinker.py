"""SmallThinker: folders of random weights, in place and converted, against the reference. The
judge of that is llama.cpp, whose logits of such a file are within 5e-6 of treadle's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import write_random
from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

N_EMBD = 64
HEAD_DIM = 32
N_FF = 32
N_EXPERT = 8
N_VOCAB = 320
WINDOWS = [0, 1, 1, 1, 0]
CONFIG = {
    "architectures": ["SmallThinkerForCausalLM"],
    "model_type": "smallthinker",
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_layout": WINDOWS,
    "sliding_window_layout": WINDOWS,
    "sliding_window_size": 16,
    "moe_ffn_hidden_size": N_FF,
    "moe_num_primary_experts": N_EXPERT,
    "moe_num_active_primary_experts": 3,
    "moe_primary_router_apply_softmax": False,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
WHOLE = {"rope_layout": [1] * 5, "sliding_window_layout": [0] * 5}


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    n_q = 4 * HEAD_DIM
    n_kv = 2 * HEAD_DIM
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_VOCAB, N_EMBD)}
    for i in range(5):
        at = f"model.layers.{i}"
        moe = f"model.layers.{i}.block_sparse_moe"
        made |= {
            f"{at}.input_layernorm.weight": (N_EMBD,),
            f"{at}.post_attention_layernorm.weight": (N_EMBD,),
            f"{at}.self_attn.q_proj.weight": (n_q, N_EMBD),
            f"{at}.self_attn.k_proj.weight": (n_kv, N_EMBD),
            f"{at}.self_attn.v_proj.weight": (n_kv, N_EMBD),
            f"{at}.self_attn.o_proj.weight": (N_EMBD, n_q),
            f"{moe}.primary_router.weight": (N_EXPERT, N_EMBD),
        }
        for e in range(N_EXPERT):
            one = f"{moe}.experts.{e}"
            made |= {f"{one}.{name}.weight": (N_FF, N_EMBD) for name in ("gate", "up")}
            made[f"{one}.down.weight"] = (N_EMBD, N_FF)
    return made | {"model.norm.weight": (N_EMBD,)} | ({} if tied else HEAD)


HEAD = {"lm_head.weight": (N_VOCAB, N_EMBD)}


def save(folder: Path, **more: Any) -> Path:
    config = {**CONFIG, **more}
    write_random(folder, shapes(config["tie_word_embeddings"]), config, 7)
    return folder


@pytest.mark.slow
def test_in_every_way(tmp_path: Path) -> None:
    made = convert(save(tmp_path / "hf"), tmp_path / "made.gguf")
    names_are_known(made, {"attn_q", "ffn_gate_inp", "ffn_gate_exps"})
    with open_gguf(made) as file:
        layers = load_config(file).layers
        truth = forward(file, load_config(file), ids_of())
    assert [layer.window for layer in layers] == [16 * flag for flag in WINDOWS]
    assert [layer.rope is not None for layer in layers] == [bool(flag) for flag in WINDOWS]
    check_truth(made, truth)
    with treadle.load(tmp_path / "hf", threads=1, kv="f32") as model:
        assert np.abs(model.logits(ids_of()) - truth).max() <= 1e-5 * np.abs(truth).max()
        labels = [step.label for step in model.plan(1).match("L0.*")]
    assert {"L0.ffn.router", "L0.ffn.route", "L0.attn.output"} <= set(labels)


def test_without_windows_all_layers_turn(tmp_path: Path) -> None:
    more = {"moe_primary_router_apply_softmax": True, "tie_word_embeddings": True, **WHOLE}
    made = convert(save(tmp_path / "hf", **more), tmp_path / "made.gguf")
    with treadle.load(made, threads=2, kv="f32") as model:
        assert all(layer.rope == 0 and not layer.window for layer in model.config.layers)
        exact = forward(model.gguf, model.config, ids_of())
        assert np.abs(model.logits(ids_of()) - exact).max() <= 1e-5 * np.abs(exact).max()
        assert reading_differences(model.gguf.metadata, model.gguf.tensors) == []


def test_the_window_of_llama_cpp(tmp_path: Path) -> None:
    made = convert(save(tmp_path / "hf"), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
        assert note.endswith("in smallthinker its window is 4096 tokens; the file says 16")
        key = "smallthinker.expert_count"
        file.metadata = {name: it for name, it in file.metadata.items() if name != key}
        with pytest.raises(FileError, match=r"smallthinker\.expert_count: the key is missing"):
            load_config(file)


@pytest.mark.parametrize(
    ("keys", "kind", "why"),
    [
        (
            {"rope_layout": [1] * 5},
            UnsupportedError,
            "rope_layout: treadle supports RoPE only in layers with",
        ),
        ({"sliding_window_layout": [1] * 5}, UnsupportedError, "sliding_window_layout: treadle"),
        ({"rope_layout": [2] * 5}, FileError, r"rope_layout: is \[2, 2"),
        ({"norm_topk_prob": False}, UnsupportedError, "norm_topk_prob: is False"),
    ],
)
def test_what_is_refused(
    keys: dict[str, Any], kind: type[Exception], why: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "hf") / "config.json"
    path.write_text(json.dumps(CONFIG | keys))
    with pytest.raises(kind, match=why):
        open_hf(tmp_path / "hf")
