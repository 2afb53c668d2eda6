"""Families beyond Llama's nearest: Hugging Face folders, run in place and converted, against
transformers, and against what llama.cpp's converter wrote of models of the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.models.hf_cases import MORE_CASES, Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.recipe import plan_entries
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import by_name

# Of a model whose context is longer than it was before it was stretched.
pytestmark = pytest.mark.filterwarnings("ignore:with a context over .* long rope factors")

_GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
_WINDOW = {"sliding_window": 16, "num_hidden_layers": 4}
_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]

# Sizes of the shared files that llama.cpp's converter wrote; the name is the file's.
SHARED: dict[str, Case] = {
    "gemma2": Case(
        "Gemma2",
        "gemma2",
        {**_WINDOW, **_GEMMA2},
    ),
    "smollm3": Case("SmolLM3", "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "granite": Case(
        "Granite",
        "granite",
        {
            "num_hidden_layers": 4,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": Case("Olmo2", "olmo2", {"num_hidden_layers": 4}),
    "olmo3": Case("Olmo3", "olmo2", {**_WINDOW, "layer_types": _LAYERS}),
    "seedoss": Case("SeedOss", "seed_oss", {"num_hidden_layers": 4, "head_dim": 32}),
    "arcee": Case("Arcee", "arcee", {"num_hidden_layers": 4, "hidden_act": "relu2"}),
    "phi3": Case("Phi3", "phi3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "phi4mini-partial": Case(
        "Phi3",
        "phi3",
        {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "glm4": Case("Glm4", "glm4", {"num_hidden_layers": 4, "head_dim": 32, "pad_token_id": 0}),
    "ernie45": Case("Ernie4_5", "ernie4_5", {"num_hidden_layers": 4, "head_dim": 32}),
    "hunyuan": Case("HunYuanDenseV1", "hunyuan-dense", {"num_hidden_layers": 4, "head_dim": 32}),
    "cohere": Case("Cohere", "command-r", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "cohere2": Case(
        "Cohere2",
        "cohere2",
        {**_WINDOW, "layer_types": _LAYERS, "tie_word_embeddings": True},
    ),
    "stablelm": Case("StableLm", "stablelm", {"num_hidden_layers": 4, "use_qkv_bias": True}),
    "starcoder2": Case("Starcoder2", "starcoder2", {"num_hidden_layers": 4}),
    "nemotron": Case("Nemotron", "nemotron", {"num_hidden_layers": 4, "hidden_act": "relu2"}),
}
OTHERS = {
    **MORE_CASES,
    "hunyuan-alpha": Case(
        "HunYuanDenseV1",
        "hunyuan-dense",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "mistral-window-linear": Case(
        "Mistral",
        "llama",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    # The list holds, whatever the interval beside it says.
    "smollm3-list": Case(
        "SmolLM3",
        "smollm3",
        {
            "num_hidden_layers": 5,
            "pad_token_id": 0,
            "no_rope_layers": [1, 1, 1, 0, 1],
            "no_rope_layer_interval": 2,
        },
    ),
    # Layers that are listed have a window, even where it is said not to be in use.
    "smollm3-window": Case(
        "SmolLM3",
        "smollm3",
        {
            "pad_token_id": 0,
            "use_sliding_window": False,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # No layer turns where a window is set and none has it.
    **{
        f"{arch}-all-global": Case(
            family,
            arch,
            {"sliding_window": 16, "layer_types": ["full_attention"] * 3},
        )
        for family, arch in (("Cohere2", "cohere2"), ("Exaone4", "exaone4"))
    },
    # Command R+ and StableLM 2 12B: each head has weights of its own in its q/k norms.
    "cohere-head-norms": Case("Cohere", "command-r", {"use_qk_norm": True}),
    "stablelm-head-norms": Case("StableLm", "stablelm", {"qk_layernorm": True}),
    "ministral3-window": Case(
        "Ministral3", "mistral3", {"head_dim": 32, "sliding_window": 16, "pad_token_id": 0}
    ),
    # GPT-NeoX-20B has the tanh form, which has many names, and Cerebras-GPT the other.
    "gptneox-20b": Case(
        "GPTNeoX", "gptneox", {"num_key_value_heads": 4, "hidden_act": "gelu_fast"}
    ),
    "cerebras": Case(
        "GPT2",
        "gpt2",
        {**MORE_CASES["gpt2"].options, "activation_function": "gelu"},
        "LMHeadModel",
    ),
    # Queries grow with positions whatever scales the rope.
    "ministral3-default": Case(
        "Ministral3",
        "mistral3",
        {
            "head_dim": 32,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.2,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "starcoder2-window": Case("Starcoder2", "starcoder2", {"sliding_window": 16}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``saved(case)``: a directory written by transformers, and its model."""
    require_transformers()
    import torch

    made: dict[str, tuple[Path, Any]] = {}
    root = tmp_path_factory.mktemp("families")

    def save(case: str) -> tuple[Path, Any]:
        if case not in made:
            model = build({**SHARED, **OTHERS}[case])
            model.to(torch.float32).save_pretrained(root / case)
            made[case] = root / case, model.to(torch.float64)
        return made[case]

    return save


@pytest.mark.parametrize("case", [*SHARED, *OTHERS])
def test_runs_in_place_and_converted(
    case: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = saved(case)
    ids = prompt()
    expected = compute_logits(model, prompt())
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 320,
}


def read(kind: str, **given: Any) -> dict[str, Any]:
    return read_config({"model_type": kind, **SIZES, **given}, Path("config.json")).metadata


_USED = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4, "pad_token_id": 0}
_TWO = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "experts_implementation": "eager",
}


@pytest.mark.parametrize(
    "case",
    [
        Case("SmolLM3", "smollm3", _USED),
        Case("Qwen3Moe", "qwen3moe", {**_USED, **_TWO, "head_dim": 32, "max_window_layers": 2}),
        Case("Qwen2Moe", "qwen2moe", {**_USED, **_TWO, "max_window_layers": 2}),
    ],
    ids=lambda case: str(case.arch),
)
def test_windows_where_no_layers_are_listed(case: Case, tmp_path: Path) -> None:
    """As in folders that are older than ``layer_types``: each family has its own default."""
    require_transformers()
    import torch

    model = build(case)
    model.to(torch.float32).save_pretrained(tmp_path)
    expected = compute_logits(model.to(torch.float64), prompt())
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        error = worst(loaded.logits(prompt()), expected)
        assert error <= rounding(loaded.config), error / rounding(loaded.config)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, UnsupportedError, r"no_rope_layers: is \[1, 0, 1, 0\]"),
        ({"no_rope_layers": [1, 1, 1, 1]}, UnsupportedError, "every 4th layer without RoPE"),
        ({"no_rope_layer_interval": 2}, UnsupportedError, "no_rope_layer_interval: is 2"),
        ({"no_rope_layers": [1, 1, 1]}, FileError, "no_rope_layers: is .* 4 flags"),
        ({"no_rope_layers": [1, 1, 1, [0]]}, FileError, "no_rope_layers: is .* 4 flags"),
        ({"no_rope_layers": "LLLG"}, FileError, "no_rope_layers: is 'LLLG'"),
    ],
)
def test_layers_without_a_rope(given: dict[str, Any], error: type[Exception], said: str) -> None:
    """A GGUF file cannot name them: all but llama.cpp's every fourth would be wrong, silently."""
    plain = read("smollm3")
    assert read("smollm3", no_rope_layers=[1, 1, 1, 0]) == plain
    assert read("smollm3", no_rope_layer_interval=4) == plain
    with pytest.raises(error, match=said):
        read("smollm3", **given)


def test_a_window_that_says_what_turns() -> None:
    kinds = {"layer_types": ["full_attention"] * 4}
    with pytest.raises(UnsupportedError, match="sliding_window: is null, but only layers with"):
        read("cohere2", **kinds, sliding_window=None)
    made = read("cohere2", **kinds)
    assert made["cohere2.attention.sliding_window"] == 4096
    assert made["cohere2.attention.sliding_window_pattern"] == [False] * 4
    found = read("exaone4", **kinds, sliding_window=None)
    assert not any("sliding_window_pattern" in key for key in found)


@pytest.mark.parametrize("asked", [None, "Q8_0"])
def test_norms_of_heads_are_in_f32(asked: str | None, tmp_path: Path) -> None:
    """Of bfloat16 weights too: llama.cpp multiplies by F32 alone, though these are matrices."""
    import torch

    require_transformers()
    build(OTHERS["cohere-head-norms"]).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    source = open_hf_source(tmp_path / "hf")
    entries = plan_entries(source, None if asked is None else by_name(asked))
    found = {entry.tensor.name: entry.type.name for entry in entries}
    shapes = {entry.tensor.name: entry.tensor.shape for entry in entries}
    source.close()
    assert shapes["blk.0.attn_q_norm.weight"] == (4, 16)
    assert shapes["blk.0.attn_k_norm.weight"] == (2, 16)
    assert {found[f"blk.0.attn_{x}_norm.weight"] for x in "qk"} == {"F32"}
    assert found["blk.0.attn_q.weight"] == (asked or "BF16")


@pytest.mark.filterwarnings("error")
def test_long_factors_are_said(saved: Callable[[str], tuple[Path, Any]]) -> None:
    """transformers chooses by the text's length, treadle by the context: within the original one
    both have the short factors, and above it a warning says what differs.
    """
    folder, model = saved("phi3-longrope")
    ids = prompt()[:20]
    expected = compute_logits(model, ids)
    with treadle.load(folder, threads=1, kv="f32", context=32) as loaded:
        assert worst(loaded.logits(ids), expected) <= rounding(loaded.config)
    with pytest.warns(UserWarning, match="with a context over 32, phi3-longrope") as said:
        treadle.load(folder, threads=1, kv="f32", context=33).close()
    assert [one.filename for one in said] == [__file__]


# Keys that llama.cpp's converter writes of these, and treadle neither needs nor writes.
UNUSED = {
    "rope.scaling.original_context_length",  # of no scaling
    "rope.scaling.type",  # none
    "attention.sliding_window",  # 0
    "attention.layer_norm_rms_epsilon",  # of an architecture with LayerNorm, or not EPS
    "attention.layer_norm_epsilon",
    "context_length",  # another one in their models
}


@pytest.mark.parametrize("case", SHARED)
def test_converts_to_what_llama_cpp_has(
    case: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path, data: Path
) -> None:
    """The same tensors in the same shapes and types, and every key of theirs, with its value where
    treadle has it.
    """
    made = convert(saved(case)[0], tmp_path / "ours.gguf")
    with open_gguf(made) as ours, open_gguf(data / "arch" / f"{case}.gguf") as theirs:
        arch = theirs.metadata["general.architecture"]
        assert ours.metadata["general.architecture"] == arch
        shapes = [{n: (t.shape, t.type_name) for n, t in f.tensors.items()} for f in (ours, theirs)]
        assert shapes[0] == shapes[1]
        for key, value in theirs.metadata.items():
            if not key.startswith(f"{arch}.") or key.removeprefix(f"{arch}.") in UNUSED:
                continue
            found = ours.metadata[key]
            if isinstance(value, float):
                assert found == pytest.approx(value, rel=1e-6), key
            else:
                assert _plain(found) == _plain(value), key


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
