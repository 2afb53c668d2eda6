"""DBRX: transformers' folders, in place and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.mlx_files import PARTS, save
from tests.convert.test_hf import convert, keys_of, prompt, worst
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_older import fill
from tests.mlx_package import import_mlx, to_numpy
from tests.models.hf_tiny import compute_logits, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

N_EXPERT = 6
N_FF = 32
CLIP = 1.5
ATTENTION: dict[str, Any] = {"kv_n_heads": 2, "clip_qkv": CLIP, "rope_theta": 20000.0}
FFN: dict[str, Any] = {"ffn_hidden_size": N_FF, "moe_num_experts": N_EXPERT, "moe_top_k": 3}
SIZES: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 128,
    "vocab_size": 320,
}
CONFIG: dict[str, Any] = {
    "model_type": "dbrx",
    **SIZES,
    "attn_config": ATTENTION,
    "ffn_config": FFN,
}


def saved(folder: Path, attention: dict[str, Any] | None = None, **ffn: Any) -> Any:
    """What transformers wrote, in float64. It takes the rope's base from outside ``attn_config``,
    where no published folder has it.
    """
    require_transformers()
    import torch
    from transformers import DbrxConfig, DbrxForCausalLM

    parts = {"attn_config": ATTENTION | (attention or {}), "ffn_config": FFN | ffn}
    rope = {"rope_type": "default", "rope_theta": ATTENTION["rope_theta"]}
    config = DbrxConfig(**SIZES, **parts, rope_parameters=rope, attn_implementation="eager")
    with float64_only():
        model = DbrxForCausalLM(config).eval()
    fill(model)
    model.to(torch.float32).save_pretrained(folder)
    return model.to(torch.float64)


def test_in_every_way(tmp_path: Path) -> None:
    model = saved(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    names_are_known(made, {"attn_qkv", "attn_output_norm", "ffn_gate_inp", "ffn_gate_exps"})
    truth = compute_logits(model, ids_of())
    assert truth.std() > 0.5
    check_truth(made, truth)
    with treadle.load(tmp_path / "hf", threads=1, kv="f32") as loaded:
        assert worst(loaded.logits(ids_of()), truth) <= rounding(loaded.config)
    with open_gguf(made) as file:
        assert file.metadata["dbrx.attention.clamp_kqv"] == CLIP
        assert reading_differences(file.metadata, file.tensors) == []


def test_what_is_clipped_and_normed_counts(tmp_path: Path) -> None:
    """With neither of them the other logits are transformers' too, which has always a limit."""
    model = saved(tmp_path / "plain", {"clip_qkv": 1e9}, moe_normalize_expert_weights=None)
    truth = compute_logits(model, prompt())
    path = tmp_path / "plain" / "config.json"
    path.write_text(path.read_text().replace("1000000000.0", "null"))
    made = convert(tmp_path / "plain", tmp_path / "plain.gguf")
    for path in (tmp_path / "plain", made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.clamp == 0.0
            assert worst(loaded.logits(prompt()), truth) <= rounding(loaded.config)
    saved(tmp_path / "clipped", moe_normalize_expert_weights=None)
    saved(tmp_path / "normed", {"clip_qkv": 1e9})
    for folder in ("clipped", "normed"):
        with treadle.load(tmp_path / folder, threads=2, kv="f32") as loaded:
            assert worst(loaded.logits(prompt()), truth) > 1e-2
    with open_gguf(made) as file:
        assert file.metadata["dbrx.attention.clamp_kqv"] == 0.0  # llama.cpp wants the key
        (note,) = reading_differences(file.metadata, file.tensors)
    assert "in dbrx it normalises expert weights to sum to 1 and ignores" in note


def one_by_one(folder: Path) -> dict[str, np.ndarray]:
    """As mlx-lm lays them: a matrix an expert, the last ones turned."""
    from safetensors.numpy import load_file

    made = {}
    for name, rows in load_file(folder / "model.safetensors").items():
        if ".experts.mlp." not in name:
            made[name] = rows
            continue
        for e, one in enumerate(np.split(rows, N_EXPERT)):
            one = one.T if name.endswith("w2") else one
            made[name.replace(".mlp", f".{e}") + ".weight"] = np.ascontiguousarray(one)
    return made


def test_as_mlx_lays_it(tmp_path: Path) -> None:
    """The same bits."""
    from safetensors.numpy import save_file

    saved(tmp_path)
    found = []
    for split in (False, True):
        if split:
            save_file(one_by_one(tmp_path), tmp_path / "model.safetensors")
        with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
            found.append(loaded.logits(prompt()))
    assert np.array_equal(found[0], found[1])


def test_as_mlx_packs_it(tmp_path: Path) -> None:
    """Experts become Q4_1, whose scales and minimums are in f16: each loses 2**-11 of itself, of
    codes up to 15, whose range is about twice the largest weight.
    """
    mx = import_mlx()
    bits = 4
    group = 32
    saved(tmp_path / "hf")
    packed = {}
    exact = {}
    for name, rows in one_by_one(tmp_path / "hf").items():
        packed[name] = mx.array(rows)
        if rows.ndim == 1:
            continue
        parts = mx.quantize(packed[name], group, bits)
        exact[name] = to_numpy(mx.dequantize(*parts, group, bits))
        stem = name.removesuffix("weight")
        packed |= {stem + part: it for part, it in zip(PARTS, parts, strict=True)}
    save(packed, tmp_path / "mlx", 1 << 30)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    settings = {"quantization": {"group_size": group, "bits": bits, "mode": "affine"}}
    (tmp_path / "mlx" / "config.json").write_text(json.dumps(config | settings))
    made = convert(tmp_path / "mlx", tmp_path / "made.gguf")
    at = "transformer.blocks.1.ffn"
    for path in (tmp_path / "mlx", made):
        with treadle.load(path, threads=1) as model:
            tensors = model.gguf.tensors
            for one, stem in (("w1", "gate"), ("v1", "up"), ("w2", "down")):
                rows = tensors[f"blk.1.ffn_{stem}_exps.weight"].dequantize()
                for e in range(N_EXPERT):
                    expected = exact[f"{at}.experts.{e}.{one}.weight"]
                    error = np.abs(rows[e] - expected).max()
                    assert error <= 3 * 2.0**-11 * np.abs(expected).max()
            router = tensors["blk.1.ffn_gate_inp.weight"].dequantize()
            assert np.array_equal(router, exact[f"{at}.router.layer.weight"])
            assert np.isfinite(model.logits(prompt())).all()


def test_files_without_treadles_keys(tmp_path: Path) -> None:
    """llama.cpp's converter writes no expert_weights_norm, and no width of an expert."""
    saved(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        whole = load_config(file)
    own = ("expert_weights_norm", "vocab_size", "key_length", "value_length", "dimension_count")
    with open_gguf(tmp_path / "made.gguf") as file:
        file.metadata = {k: it for k, it in file.metadata.items() if not k.endswith(own)}
        assert load_config(file) == whole
    experts = whole.layers[0].experts
    assert experts is not None
    assert (experts.n, experts.n_used, experts.n_ff, experts.norm) == (N_EXPERT, 3, N_FF, True)


def test_the_base_is_that_of_training() -> None:
    """A folder that transformers 5 wrote of a published one says 10000 too."""
    lost = {"rope_type": "default", "rope_theta": 10000.0}
    for more in ({}, {"rope_parameters": lost}, {"rope_theta": 10000.0}):
        assert keys_of(CONFIG | more)["dbrx.rope.freq_base"] == 20000.0
    parts = {"attn_config": {"kv_n_heads": 2}, "rope_parameters": {"rope_theta": 30000.0}}
    assert keys_of(CONFIG | parts)["dbrx.rope.freq_base"] == 30000.0


@pytest.mark.parametrize(
    ("keys", "kind", "why"),
    [
        ({"attn_config": {"kv_n_heads": "2"}}, FileError, r"attn_config\.kv_n_heads: is '2'"),
        ({"attn_config": [1]}, FileError, r"attn_config: is \[1\]"),
        ({"attn_config": {"clip_qkv": -1}}, FileError, r"attn_config\.clip_qkv: is -1"),
        ({"ffn_config": {"moe_num_experts": 0}}, FileError, r"ffn_config\.moe_num_experts: is 0"),
        (
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            UnsupportedError,
            r"ffn_config\.moe_normalize_expert_weights: is 2\.0",
        ),
        (
            {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}},
            UnsupportedError,
            r"ffn_config\.ffn_act_fn\.name: 'gelu'",
        ),
        ({"tie_word_embeddings": True}, UnsupportedError, "tie_word_embeddings: is True"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], kind: type[Exception], why: str) -> None:
    keys_of(CONFIG)
    with pytest.raises(kind, match=why):
        keys_of(CONFIG | keys)


def test_experts_of_another_width(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    for key, value in (("ffn_hidden_size", 64), ("moe_num_experts", 7)):
        path.write_text(json.dumps({**said, "ffn_config": {**said["ffn_config"], key: value}}))
        with pytest.raises(FileError, match=r"experts\.(mlp\.v1|w1)"):
            open_hf(tmp_path)
