"""The claim "one small file": an FFN with a router, whose number of tiles is known as the run goes.

Of each token's scores the highest chooses one of four matrices. Tokens of one matrix are put into
tiles, and the step that multiplies has as many items as there are tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import treadle
from tests.engine.test_engine import decode, prefill, text
from tests.reference import Array, Layer, forward
from tests.tiny import rounding, write_model
from tests.toys.conftest import Register
from treadle.jit.types import f32, i64
from treadle.kernels.spec import Args, Frame, Grid, Spec
from treadle.models.archs import ARCHS, Arch
from treadle.models.config import Config
from treadle.models.ffns import FFNS
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import DECODER
from treadle.models.keys import ArchMetadata
from treadle.models.structure import Sublayer, TensorRow
from treadle.plan.lowering.deferred import Floats
from treadle.plan.lowering.ops import WORDS, PlanOps
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.models.ops import Ops, Rows

N_EXPERT = 4
TILE = 3
RECORD = 2 + TILE  # of a tile: expert, number of tokens, tokens; i64, behind the number of tiles


# -- the sublayer ---------------------------------------------------------------------------------


def build(g: Ops, i: int, h: Rows) -> Rows:
    scores = g.linear(f"L{i}.ffn.scores", h, f"blk.{i}.ffn_route")
    return g.call("experts", f"L{i}.ffn", h, scores, weight=f"blk.{i}.ffn_expert.weight")


ROUTER = Sublayer(
    label="ffn",
    before="ffn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        TensorRow("ffn_norm.weight", ("n_embd",)),
        TensorRow("ffn_route.weight", ("n_expert", "n_embd")),
        TensorRow("ffn_expert.weight", ("n_expert", "n_embd", "n_embd")),
    ),
    sizes=lambda layer: {"n_expert": N_EXPERT},
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    config = DECODER.read(keys, arch)
    return replace(config, layers=tuple(replace(at, ffn="router") for at in config.layers))


# -- its word, and two kernels --------------------------------------------------------------------


def experts(ops: PlanOps, label: str, h: Rows, scores: Rows, *, weight: str) -> Rows:
    steps = ops.steps
    chosen = ops.floats(scores)
    rows = ops.floats(h)
    tiles = Buffer(f"{label}.tiles", 1, 8 * (1 + RECORD * (steps.plan.n_tokens + N_EXPERT)), "i8")
    stride = chosen.row_bytes // 4
    steps.emit(f"{label}.route", Route(), Grid(1), scores=chosen, tiles=tiles, stride=stride)
    out = steps.floats(label, h.width)
    steps.emit(
        label,
        Experts(h.width),
        Grid(1, "tiles"),
        tiles=tiles,
        x=rows,
        w=steps.weight(weight)[0],
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, h.width, out)


@dataclass(frozen=True)
class Route(Spec):
    """Which tokens go to which expert: the one with the highest score."""

    op: ClassVar[str] = "toy_route"
    args = Args("scores:in tiles:out stride")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n_tiles = k.var(k.i64(0))
        held = k.var(k.i64(0))
        for expert in range(N_EXPERT):
            held.v = k.i64(0)
            with k.loop(frame.run("n_tokens")) as n:
                row = frame.scores + n * frame.stride * 4
                scores = [k.load(row, f32, offset=4 * i) for i in range(N_EXPERT)]
                best = scores[expert] >= scores[expert]
                for other in range(N_EXPERT):
                    if other != expert:
                        best = best & (scores[expert] > scores[other])
                with k.if_(best):
                    with k.if_(held.v.eq(0)):
                        n_tiles.v = n_tiles.v + 1
                    tile = frame.tiles + ((n_tiles.v - 1) * RECORD + 1) * 8
                    k.store(tile, k.i64(expert))
                    k.store(tile, held.v + 1, offset=8)
                    k.store(tile + (held.v + 2) * 8, n)
                    held.v = (held.v + 1) % TILE
        k.store(frame.tiles, n_tiles.v)

    def run_ref(self, args: Any, run: Any) -> None:
        best = args.scores.reshape(-1, args.stride)[: run["n_tokens"], :N_EXPERT].argmax(1)
        n_tiles = 0
        for expert in range(N_EXPERT):
            tokens = np.flatnonzero(best == expert)
            for at in range(0, len(tokens), TILE):
                part = tokens[at : at + TILE]
                tile = args.tiles[1 + n_tiles * RECORD :]
                tile[: 2 + len(part)] = [expert, len(part), *part]
                n_tiles += 1
        args.tiles[0] = n_tiles


@dataclass(frozen=True)
class Experts(Spec):
    """``out = W[expert] x`` of each tile's tokens. Items: tiles."""

    op: ClassVar[str] = "toy_experts"
    args = Args("tiles:in x:in w:const out:out stride out_stride")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            tile = frame.tiles + (item * RECORD + 1) * 8
            w = frame.w + k.load(tile, i64) * (4 * self.k * self.k)
            with k.loop(k.load(tile, i64, offset=8)) as t:
                token = k.load(tile + (t + 2) * 8, i64)
                x = frame.x + token * frame.stride * 4
                with k.loop(self.k) as m:
                    at = token * frame.out_stride * 4 + m * 4
                    total = k.var(k.const(0.0, f32))
                    with k.loop(self.k) as c:
                        weight = k.load(w + (m * self.k + c) * 4, f32)
                        total.v = k.fma(weight, k.load(x + c * 4, f32), total.v)
                    k.store(frame.out + at, total.v)

    def run_ref(self, args: Any, run: Any) -> None:
        x = args.x.view(np.float32).reshape(-1, args.stride)[:, : self.k].astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)
        w = args.w.reshape(-1).view(np.float32).reshape(N_EXPERT, self.k, self.k)
        for tile in args.tiles[1:][: args.tiles[0] * RECORD].reshape(-1, RECORD):
            tokens = tile[2 : 2 + tile[1]]
            out[tokens, : self.k] = x[tokens] @ w[tile[0]].T


# -- in plain numpy -------------------------------------------------------------------------------


def routed(config: Config, i: int, x: Array, tensor: Callable[[str], Array]) -> Array:
    h = Layer(config, i, tensor).norm(x, "ffn_norm")
    best = (h @ tensor(f"blk.{i}.ffn_route.weight").T).argmax(1)
    assert len(set(best)) > 1  # or the router would not be seen at work
    w = tensor(f"blk.{i}.ffn_expert.weight")[best]
    return np.asarray(x + np.einsum("nij,nj->ni", w, h))


def test_a_router_among_experts(register: Register, tmp_path: Path) -> None:
    register(ARCHS, "routed", Arch("routed", graph="routed"))
    register(GRAPHS, "routed", replace(DECODER, read=read))
    register(FFNS, "router", ROUTER)
    register(WORDS, "experts", experts)
    write_model(tmp_path / "toy.gguf", "routed")
    with treadle.load(tmp_path / "toy.gguf", threads=2, kv="f32") as model:
        for n in (1, 512):
            model.plan(n).check()
        ids = text(50)
        truth = forward(model.gguf, model.config, ids, feed=routed)
        for logits in (prefill(model.engine, ids), decode(model.engine, ids)):
            error = np.abs(logits - truth).max() / np.abs(truth).max()
            assert error <= rounding(model.config)
