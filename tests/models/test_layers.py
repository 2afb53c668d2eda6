"""Layers of one model that are not alike, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.engine.test_engine import decode, prefill, text
from tests.reference import forward
from tests.tiny import rounding
from treadle.errors import TreadleError

UNEQUAL = {"n_ff": [96, 32, 160], "n_head": [4, 2, 6], "n_head_kv": [2, 2, 3]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_heads_and_widths_of_each_layer(arch: str, tiny: WriteTiny) -> None:
    with treadle.load(tiny(arch, window=16, **UNEQUAL), threads=2, kv="f32") as model:
        layers = model.config.layers
        assert [layer.n_ff for layer in layers] == UNEQUAL["n_ff"]
        assert [layer.n_head for layer in layers] == UNEQUAL["n_head"]
        assert [layer.n_head_kv for layer in layers] == UNEQUAL["n_head_kv"]
        check(model)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim_v", [16, 96])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_values_of_another_size_than_keys(arch: str, head_dim_v: int, tiny: WriteTiny) -> None:
    path = tiny(arch, window=16, head_dim_v=head_dim_v)
    with treadle.load(path, threads=2, kv="f32") as model:
        assert {layer.head_dim_v for layer in model.config.layers} == {head_dim_v}
        check(model)


def test_learned_positions_end(tiny: WriteTiny) -> None:
    """Behind the last row there is nothing to read: a longer context is refused."""
    path = tiny("gpt2", n_ctx=64, n_head_kv=4)
    with pytest.raises(TreadleError, match="context=65: the model has only 64 learned positions"):
        treadle.load(path, context=65)
    with treadle.load(path, threads=2, kv="f32") as model:
        assert model.n_ctx == 64
        check(model)


def check(model: treadle.Model) -> None:
    """Plans are sound, and logits right, of few tokens at once and of many."""
    for n in (1, model.engine.max_tokens):
        model.plan(n).check()
    ids = text(50)
    truth = forward(model.gguf, model.config, ids)
    for logits in (prefill(model.engine, ids), decode(model.engine, ids)):
        error = np.abs(logits - truth).max() / np.abs(truth).max()
        assert error <= rounding(model.config)
