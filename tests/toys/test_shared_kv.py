"""The claim "one small file": layers that read another one's keys and values, as Gemma 3n's last
ones do. They have queries alone, and no part of a page.

Of six layers two own theirs, one that sees a window and one that sees everything; each of the
others reads those of the one that is like it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import treadle
from tests.engine.test_engine import decode, prefill, text
from tests.reference import Array, Layer, Sublayer, Tensors, attention, forward, rope
from tests.stepwise import walk
from tests.tiny import rounding, write_model
from tests.toys.conftest import Register
from treadle.engine.batch import BatchItem
from treadle.errors import UnsupportedError
from treadle.kernels.attention.rope import RopeStore
from treadle.models.archs import ARCHS, QK_NORM, WINDOW, Arch
from treadle.models.config import Config
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import DECODER
from treadle.models.keys import ArchMetadata
from treadle.models.mixers import MIXERS
from treadle.models.mixers.attention import ATTENTION

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows

KV_FROM = (0, 1, 0, 1, 1, 0)
ROW = Arch("shared", graph="shared", needs=QK_NORM)


def build(g: Ops, i: int, h: Rows) -> Rows:
    layer = g.config.layers[i]
    at = f"L{i}.attn"
    blk = f"blk.{i}.attn"
    q = g.norm(
        f"{at}.q_norm", g.linear(f"{at}.q", h, f"{blk}_q"), f"{blk}_q_norm", heads=layer.n_head
    )
    assert layer.rope is not None
    return g.linear(
        f"{at}.output", g.attend(at, i, g.rope(f"{at}.rope", q, layer.rope)), f"{blk}_output"
    )


OWN = ("attn_k.", "attn_v.", "attn_k_norm.")
SHARING = replace(
    ATTENTION,
    build=build,
    rows=tuple(row for row in ATTENTION.rows if not row.name.startswith(OWN)),
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    config = DECODER.read(keys, arch)
    window = keys.integer(WINDOW, 0, lo=0, hi=1000)
    layers = [
        replace(
            at,
            kv_from=j,
            window=0 if j else window,
            rope=0,
            mixer="attention" if i == j else "sharing",
        )
        for i, (at, j) in enumerate(zip(config.layers, KV_FROM, strict=True))
    ]
    return replace(config, layers=tuple(layers), ropes=config.ropes[:1])


def shared() -> Sublayer:
    """Attention in plain numpy, which remembers the keys and values of those who own them."""
    kept: dict[int, tuple[Array, Array]] = {}

    def mix(config: Config, i: int, x: Array, tensor: Tensors) -> Array:
        maps = Layer(config, i, tensor)
        at = config.layers[i]
        inverse, factor = config.ropes[0].frequencies(4096)[:2]

        def turned(x: Array, n_head: int, name: str) -> Array:
            heads = maps.norm(x.reshape(len(x), n_head, -1), f"attn_{name}_norm")
            return rope(heads, inverse, factor, config.arch.rope)

        h = maps.norm(x, "attn_norm")
        q = turned(maps.linear(h, "attn_q"), at.n_head, "q")
        if at.kv_from == i:
            k = turned(maps.linear(h, "attn_k"), at.n_head_kv, "k")
            kept[i] = k, maps.linear(h, "attn_v").reshape(len(x), at.n_head_kv, -1)
        a = attention(q, *kept[at.kv_from], config.attn_scale, 0.0, at.window)
        return x + maps.linear(a.reshape(len(x), -1), "attn_output")

    return mix


@pytest.fixture
def path(register: Register, tmp_path: Path) -> Path:
    register(ARCHS, "shared", ROW)
    register(GRAPHS, "shared", replace(DECODER, read=read))
    register(MIXERS, "sharing", SHARING)
    write_model(tmp_path / "toy.gguf", "shared", n_layer=6, window=16)
    return tmp_path / "toy.gguf"


def test_layers_that_read_anothers_keys_and_values(path: Path) -> None:
    with treadle.load(path, threads=2, kv="f32", n_sequences=2, context=1200) as model:
        pools = model.engine.cache.pools
        assert [(pool.layers, pool.window) for pool in pools] == [((1,), 0), ((0,), 16)]
        for n in (1, 512):
            plan = model.plan(n)
            plan.check()
            specs = [step.spec for step in plan.match("L*.attn.rope")]
            alone = [spec.queries_only for spec in specs if isinstance(spec, RopeStore)]
            assert alone == [False, False, True, True, True, True]
        ids = text(50)
        truth = forward(model.gguf, model.config, ids, mix=shared())
        for logits in (prefill(model.engine, ids), decode(model.engine, ids)):
            error = np.abs(logits - truth).max() / np.abs(truth).max()
            assert error <= rounding(model.config)


def test_pages_in_files(path: Path, tmp_path: Path) -> None:
    """They hold the keys and values of those that own theirs, and serve all after a restart."""
    ids = text(100)
    made = []
    for _ in range(2):
        with treadle.load(
            path, threads=1, deterministic=True, cache_dir=tmp_path / "pages"
        ) as model:
            made.append(model.generate(ids, max_tokens=5, temperature=0))
            made[-1].finish()
    assert made[0].ids == made[1].ids
    assert [each.timings.cache.files for each in made] == [0, 96]


def test_every_step_agrees_with_its_twin(path: Path) -> None:
    """Of a chunk beside a text that is being written, far enough for its history to be split."""
    with treadle.load(path, threads=2, kv="f32", n_sequences=2, context=1200) as model:
        engine = model.engine
        ids = text(700)
        with closing(engine.cache.sequence()) as long, closing(engine.cache.sequence()) as short:
            engine.run([BatchItem(long, ids[:512], 0)])
            engine.run([BatchItem(long, ids[512:], 0)])
            for batch in (
                [BatchItem(long, [5]), BatchItem(short, ids[::-1][:40])],
                [BatchItem(long, [6])],
            ):
                worst = max(walk(engine, batch), key=lambda compared: compared.error)
                assert worst.error <= 1, (worst.label, worst.kind, worst.error)


def test_unlike_layers_do_not_share(path: Path, register: Register) -> None:
    def windows(keys: ArchMetadata, arch: Arch) -> Config:
        config = read(keys, arch)
        last = replace(config.layers[-1], window=17)
        return replace(config, layers=(*config.layers[:-1], last))

    register(GRAPHS, "shared", replace(DECODER, read=windows))
    with (
        treadle.load(path, threads=1) as model,
        pytest.raises(
            UnsupportedError,
            match=r"L5: its keys .* do not match the KV cache of layer 0",
        ),
    ):
        model.plan()
