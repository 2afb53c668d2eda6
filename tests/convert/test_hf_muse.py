"""Muse Glimmer: folders, in place and converted, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_pictures import build_outer, logits, save
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

_TEXT: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_MORE = {"image_token_id": 310, "video_token_id": 311, "out_hidden_size": 128}
_MORE |= {"projector_hidden_size": 32}


# All that llama.cpp's loader of this architecture asks for.
NAMES = """
    token_embd output_norm output attn_norm post_attention_norm attn_q attn_k attn_v attn_output
    attn_q_norm attn_k_norm attn_gate ffn_norm post_ffw_norm ffn_gate ffn_up ffn_down
"""


def build(**text: Any) -> Any:
    return build_outer("MuseGlimmer", {**_TEXT, **text}, _VISION, _MORE, "muse")


def test_in_every_way(tmp_path: Path) -> None:
    model = build()
    truth = logits(model, ids_of())
    made = convert(save(model, tmp_path / "hf"), tmp_path / "made.gguf")
    check_truth(made, truth)
    check_returns(made)
    with open_gguf(made) as file:
        stems = {name.removeprefix("blk.0.").removesuffix(".weight") for name in file.tensors}
        assert {stem for stem in stems if not stem.startswith("blk.")} == {*NAMES.split()}
        config = load_config(file)
        norms = [file.tensors[f"blk.1.attn_{x}_norm.weight"].dequantize() for x in "qk"]
    assert np.array_equal(norms, np.repeat(np.array([[3.87], [1.0]], np.float32), 32, 1))
    assert config.post_norm_eps == np.float32(1e-8)
    # Layers without a window are counted from the last.
    assert [layer.window for layer in config.layers] == [16, 0, 16, 16, 16, 0]
    assert all((layer.rope is not None) == (layer.window > 0) for layer in config.layers)


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    model = build()
    truth = logits(model, ids_of())
    made = convert(save(model, tmp_path / "hf"), tmp_path / "made.gguf")
    check_instruction_set(made, ids_of(), truth, PORTABLE)


@pytest.mark.parametrize(
    "more",
    [
        {"post_norm_eps": 0.25, "qk_scale_factor": 2.5, "output_multiplier": 0.5},
        {
            "layer_types": ["full_attention"] * 6,
            "layer_rope_theta": [0] * 6,
            "final_logit_softcapping": 3.0,
        },
    ],
)
def test_in_place_and_converted(more: dict[str, Any], tmp_path: Path) -> None:
    model = build(**more)
    truth = logits(model, ids_of())
    folder = save(model, tmp_path / "hf")
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids_of()), truth)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


def test_the_text_part_alone() -> None:
    """52 layers have the pattern that files need not say."""
    made = read_config({"model_type": "muse_glimmer_text"}, Path("config.json")).metadata
    assert made["muse-glimmer.attention.sliding_window"] == 2048
    assert "muse-glimmer.attention.sliding_window_pattern" not in made
    assert made["muse-glimmer.logit_scale"] == np.float32(0.19611613513818404)


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"sliding_window": None}, UnsupportedError, "sliding_window: is null"),
        (
            {"layer_rope_theta": [1e4] * 52},
            UnsupportedError,
            "layer_rope_theta: .*only in all layers with a window",
        ),
        ({"layer_rope_theta": [0, 1]}, FileError, r"layer_rope_theta: is \[0, 1\].* a list of 52"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias: is True"),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        read_config({"model_type": "muse_glimmer_text", **change}, Path("config.json"))
