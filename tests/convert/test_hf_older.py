"""Families whose layers differ in size or lack a half: folders, run in place and converted, against
modules of transformers that are put together as the families' own code does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.models.hf_tiny import EPS, compute_logits, float64_only, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.stepwise import walk
from treadle.convert.hf.config import read_config
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.run_state import PAGE
from treadle.models.config import PoolSpec
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config

N_EMBD = 64
N_HEAD = 4
N_VOCAB = 320
CONTEXT = 256
SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "num_attention_heads": N_HEAD,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NO_ATTENTION: dict[str, Any] = {
    "n_heads_in_group": None,
    "no_op": True,
    "replace_with_linear": False,
    "sparsify": None,
    "window_length": None,
}
MATRIX = {**NO_ATTENTION, "no_op": False, "replace_with_linear": True}
NO_FFN: dict[str, Any] = {"ffn_mult": None, "no_op": True, "replace_with_linear": False}


def attention(group: int) -> dict[str, Any]:
    return {**NO_ATTENTION, "n_heads_in_group": group, "no_op": False}


def ffn(mult: float) -> dict[str, Any]:
    return {**NO_FFN, "ffn_mult": mult, "no_op": False}


BLOCKS = [
    {"attention": attention(2), "ffn": ffn(10.0)},  # 426, which becomes 512
    {"attention": NO_ATTENTION, "ffn": ffn(5.25)},
    {"attention": MATRIX, "ffn": ffn(6.0)},
    {"attention": NO_ATTENTION, "ffn": NO_FFN},
    {"attention": attention(4), "ffn": ffn(6.0)},
    {"attention": attention(2), "ffn": NO_FFN},
    {"attention": MATRIX, "ffn": NO_FFN},
]
N_KV = [2, 0, 0, 0, 1, 2, 0]
WIDTHS = [512, 256, 256, 0, 256, 0, 0]
FOLDERS: dict[str, dict[str, Any]] = {
    "nemotron-nas": {
        **SIZES,
        "num_hidden_layers": len(BLOCKS),
        "num_key_value_heads": None,
        "intermediate_size": None,
        "block_configs": BLOCKS,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "deci": {
        **SIZES,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_key_value_heads_per_layer": [4, 1, 2],
        "intermediate_size": 96,
    },
}


@dataclass(frozen=True)
class Made:
    """A folder, what is converted of it, and its logits."""

    folder: Path
    path: Path
    logits: Callable[[list[int]], np.ndarray]


def thinned_llama(n_kv: list[int], widths: list[int], rope: dict[str, Any]) -> Any:
    """Llama of transformers, its layers of these heads of keys and of these widths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    class Nothing(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, **given: Any) -> Any:
            zeros = torch.zeros_like(hidden_states)
            return (zeros, None) if given else zeros

    class Matrix(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear_attn = torch.nn.Linear(N_EMBD, N_EMBD, bias=False)

        def forward(self, hidden_states: Any, **given: Any) -> Any:
            return self.linear_attn(hidden_states), None

    def config(n: int, width: int) -> Any:
        return LlamaConfig(
            **SIZES,
            num_hidden_layers=len(widths),
            num_key_value_heads=n or N_HEAD,
            intermediate_size=width or 96,
            rope_parameters=rope,
            use_cache=False,
            attn_implementation="eager",
        )

    with float64_only():
        model = LlamaForCausalLM(config(1, 96)).eval()
        for i, layer in enumerate(model.model.layers):
            own = config(n_kv[i], widths[i])
            layer.self_attn, layer.mlp = LlamaAttention(own, i), LlamaMLP(own)
            if not n_kv[i]:
                matrix = BLOCKS[i]["attention"] is MATRIX
                layer.self_attn = Matrix() if matrix else Nothing()
                layer.input_layernorm = layer.input_layernorm if matrix else torch.nn.Identity()
            if not widths[i]:
                layer.mlp, layer.post_attention_layernorm = Nothing(), torch.nn.Identity()
        model.eval()
    fill(model)
    return model


def fill(model: Any) -> None:
    """Weights that keep activations near 1, and logits apart."""
    import torch

    rng = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            x = rng.standard_normal(tuple(parameter.shape))
            if parameter.ndim == 1:
                x = 1.0 + 0.25 * x
            elif "embed" not in name:
                x = x * (3.0 if "lm_head" in name else 1.4) / math.sqrt(x.shape[1])
            parameter.copy_(torch.from_numpy(x.astype(np.float32).astype(np.float64)))


def save(folder: Path, model: Any, kind: str, config: dict[str, Any]) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    floats = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
    save_file(floats, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """``made(kind)``."""
    require_transformers()
    found: dict[str, Made] = {}
    root = tmp_path_factory.mktemp("older")

    def make(kind: str) -> Made:
        if kind in found:
            return found[kind]
        config = FOLDERS[kind]
        if kind == "deci":
            model = thinned_llama(
                config["num_key_value_heads_per_layer"],
                [96] * 3,
                {"rope_type": "default", "rope_theta": 10000.0},
            )
        else:
            model = thinned_llama(N_KV, WIDTHS, {"rope_theta": 500000.0, **LLAMA3})
        folder = save(root / kind, model, kind, config)
        path = convert(folder, root / f"{kind}.gguf")
        found[kind] = Made(folder, path, lambda ids: compute_logits(model, ids))
        return found[kind]

    return make


@pytest.mark.parametrize("kind", FOLDERS)
def test_agrees_with_transformers(kind: str, made: Callable[[str], Made]) -> None:
    truth = made(kind).logits(ids_of())
    assert truth.std() > 0.5
    check_truth(made(kind).path, truth)
    check_truth(made(kind).folder, truth, threads_of=(2,))


def test_layers_as_the_file_has_them(made: Callable[[str], Made]) -> None:
    """Pages are those of layers with attention; the steps of a half that is gone are gone."""
    with treadle.load(made("nemotron-nas").path, threads=1) as model:
        halves = [(layer.mixer, layer.ffn) for layer in model.config.layers]
        pools = GRAPHS[model.config.arch.graph].pools(model.config)
        steps = {step.label for step in model.plan(1)}
    whole = ("attention", "gated")
    matrix = ("linear", "gated")
    last = [("attention", ""), ("linear", "")]
    assert halves == [whole, ("", "gated"), matrix, ("", ""), whole, *last]
    found = [(p.layers, p.n_head_kv) for p in pools if isinstance(p, PoolSpec)]
    assert found == [((0, 5), 2), ((4,), 1)]
    assert not {label for label in steps if label.startswith(("L1.attn", "L3.", "L5.ffn"))}
    assert {"L2.attn.output", "L5.attn.output", "L6.attn.norm"} <= steps
    with open_gguf(made("nemotron-nas").path) as gguf:
        assert gguf.metadata["general.architecture"] == "deci"
        assert list(gguf.metadata["deci.attention.head_count"]) == [4, 0, 4, 0, 4, 4, 4]  # type: ignore[arg-type]
        assert list(gguf.metadata["deci.attention.head_count_kv"]) == N_KV  # type: ignore[arg-type]
        assert list(gguf.metadata["deci.feed_forward_length"]) == WIDTHS  # type: ignore[arg-type]


def test_a_whole_model_is_a_llama(tmp_path: Path) -> None:
    """Where no layer lacks anything: the same tensors, and the same bits."""
    require_transformers()
    model = thinned_llama([2] * 2, [96] * 2, {"rope_type": "default", "rope_theta": 10000.0})
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 96}
    bits = []
    for kind in ("llama", "deci"):
        folder = save(tmp_path / kind, model, kind, sizes)
        for path in (folder, convert(folder, tmp_path / f"{kind}.gguf")):
            with treadle.load(path, threads=2, kv="f32") as loaded:
                assert loaded.config.arch.name == kind
                bits.append(loaded.logits(ids_of()))
    assert np.array_equal(bits[0], bits[2])  # in place
    assert np.array_equal(bits[1], bits[3])  # converted


def test_texts_that_begin_alike(made: Callable[[str], Made]) -> None:
    """Found in pages, taken back, forked: the bits are those of one go."""
    ids = np.random.default_rng(3).integers(3, N_VOCAB, 2 * PAGE + 12).tolist()
    other = [*ids[: 2 * PAGE], *ids[:9]]
    path = made("nemotron-nas").path
    with treadle.load(path, threads=2, deterministic=True, n_sequences=3) as model:
        engine = model.engine
        truth = model.logits(ids)
        others = model.logits(other)
        engine.cache.forget()
        with closing(model.session()) as first, closing(model.session()) as second:
            assert np.array_equal(first.prefill(ids), truth[-1])
            assert second.match(other) == 2 * PAGE
            assert np.array_equal(second.prefill(other), others[-1])
            first.truncate(len(ids) - 5)
            assert np.array_equal(first.feed(ids[-5:]), truth[-1])
            with closing(engine.cache.fork(second.seq)) as fork:
                rows = [
                    engine.run([BatchItem(seq, [5], 1)])[0].copy() for seq in (second.seq, fork)
                ]
            assert np.array_equal(*rows)


def test_every_step_agrees_with_its_twin(made: Callable[[str], Made]) -> None:
    """In batches of several texts, and of one token."""
    ids = np.random.default_rng(4).integers(3, N_VOCAB, 60).tolist()
    path = made("nemotron-nas").path
    with treadle.load(path, threads=2, kv="f32", n_sequences=2, context=CONTEXT) as model:
        engine = model.engine
        with closing(engine.cache.sequence()) as long, closing(engine.cache.sequence()) as one:
            engine.run([BatchItem(long, ids[:40], 0)])
            for batch in (
                [BatchItem(long, ids[40:]), BatchItem(one, ids[:3])],
                [BatchItem(long, [6])],
            ):
                found = list(walk(engine, batch))
                worst = max(found, key=lambda compared: compared.error)
                assert worst.error <= 1, (worst.label, worst.kind, worst.error)


def changed(i: int, half: str, **said: Any) -> dict[str, Any]:
    """Nemotron's config.json with other words for a half of layer ``i``."""
    blocks: list[dict[str, Any]] = [dict(block) for block in BLOCKS]
    blocks[i][half] = {**blocks[i][half], **said}
    return {"model_type": "nemotron-nas", **FOLDERS["nemotron-nas"], "block_configs": blocks}


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (changed(1, "attention", window_length=64), UnsupportedError, "window_length: is 64"),
        (changed(2, "ffn", replace_with_linear=True), UnsupportedError, "replace_with_linear"),
        (changed(0, "ffn", moe={"num_local_experts": 8}), UnsupportedError, r"\[0\]\.ffn\.moe: is"),
        (changed(0, "attention", n_heads_in_group=3), FileError, "a divisor of 4 heads"),
        (changed(4, "ffn", ffn_mult="wide"), FileError, r"block_configs\[4\]\.ffn\.ffn_mult"),
        ({**changed(0, "ffn"), "num_hidden_layers": 5}, FileError, "a list of 5"),
        ({**changed(0, "ffn"), "block_configs": [1] * 7}, FileError, r"block_configs\[0\]: is 1"),
        ({**changed(0, "ffn"), "block_configs": [{}] * 7}, FileError, r"attention: is missing"),
    ],
)
def test_blocks_that_treadle_has_not(
    config: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        read_config(config, Path("config.json"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count", [4, 4, 4, 0, 4, 4, 4], r"blk\.1\.attn_norm\.weight: .* missing"),
        (
            "attention.head_count",
            [4, 0, 0, 0, 4, 4, 4],
            r"blk\.2\.attn_norm\.weight: is unused",
        ),
        (
            "feed_forward_length",
            [512, 256, 0, 0, 256, 0, 0],
            r"blk\.2\.ffn_norm\.weight: is unused",
        ),
    ],
)
def test_keys_and_tensors_that_disagree(
    key: str, value: list[int], said: str, made: Callable[[str], Made]
) -> None:
    with open_gguf(made("nemotron-nas").path) as gguf:
        metadata: dict[str, Any] = {**gguf.metadata, f"deci.{key}": value}
        gguf.metadata = metadata
        with pytest.raises(FileError, match=said):
            load_config(gguf)
