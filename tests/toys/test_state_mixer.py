"""The claim "one small file": a mixer that keeps a state for each sequence, beside attention.

``s[t] = decay * s[t - 1] + v[t]``, channel by channel; every second layer of the toy has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import treadle
from tests.engine.test_engine import text
from tests.reference import Array, Layer, forward, mixed
from tests.tiny import rounding, write_model
from tests.toys.conftest import Register
from treadle.engine.batch import BatchItem
from treadle.jit.types import f32, i64, ptr
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Args, Frame, Grid, Spec
from treadle.models.archs import ARCHS, Arch
from treadle.models.config import Config, StateSpec
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import DECODER
from treadle.models.keys import ArchMetadata
from treadle.models.mixers import MIXERS
from treadle.models.structure import Sublayer, TensorRow
from treadle.plan.lowering.deferred import Floats
from treadle.plan.lowering.ops import WORDS, PlanOps

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.models.ops import Ops, Rows


# -- the sublayer ---------------------------------------------------------------------------------


def build(g: Ops, i: int, h: Rows) -> Rows:
    at = f"L{i}.mix"
    blk = f"blk.{i}.mix"
    v = g.linear(f"{at}.in", h, f"{blk}_in")
    s = g.call("decay", f"{at}.scan", v, layer=i, weight=f"{blk}_decay.weight")
    return g.linear(f"{at}.out", s, f"{blk}_out")


DECAY = Sublayer(
    label="mix",
    before="mix_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        TensorRow("mix_norm.weight", ("n_embd",)),
        TensorRow("mix_in.weight", ("n_state", "n_embd")),
        TensorRow("mix_decay.weight", ("n_state",)),
        TensorRow("mix_out.weight", ("n_embd", "n_state")),
    ),
    sizes=lambda layer: {"n_state": layer.n_ff},
    memory=lambda layer: (StateSpec("decay", (), layer.n_ff),),
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    config = DECODER.read(keys, arch)
    kinds = ("decay", "attention") * config.n_layer
    layers = (replace(at, mixer=kind) for at, kind in zip(config.layers, kinds, strict=False))
    return replace(config, layers=tuple(layers))


# -- its word, and a kernel -----------------------------------------------------------------------


def decay(ops: PlanOps, label: str, v: Rows, *, layer: int, weight: str) -> Rows:
    steps = ops.steps
    x = ops.floats(v)
    states = steps.cache.states_of(layer)
    out = steps.floats(label, v.width)
    steps.emit(
        label,
        Scan(v.width),
        Grid(1, "n_parts"),
        x=x,
        decay=steps.vector(weight),
        states=states.const,
        out=out,
        stride=x.row_bytes // 4,
        cell_bytes=states.cell_bytes,
        layer_off=states.layer_off(layer),
    )
    return Floats(label, v.width, out)


@dataclass(frozen=True)
class Scan(Spec):
    """Each part's tokens in order, from its sequence's state to the next one. Items: parts."""

    op: ClassVar[str] = "toy_scan"
    args = Args("x:in decay:const states:const out:out stride cell_bytes layer_off")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        assert PART.fields is not None
        at = {name: int(field[1]) for name, field in PART.fields.items()}
        with k.loop(frame.end, start=frame.begin) as item:
            record = frame.run("parts", ptr) + item * PART.itemsize
            part = {name: k.load(record, i64, offset=off) for name, off in at.items()}
            old, new = (
                frame.states + (part[name] * frame.cell_bytes + frame.layer_off)
                for name in ("state", "next")
            )
            with k.loop(self.k) as c:
                gain = k.load(frame.decay + c * 4, f32)
                s = k.var(k.const(0.0, f32))
                with k.if_(part["position"] > 0):
                    s.v = k.load(old + c * 4, f32)
                with k.loop(part["n_tokens"]) as t:
                    place = ((part["token"] + t) * frame.stride + c) * 4
                    s.v = k.fma(gain, s.v, k.load(frame.x + place, f32))
                    k.store(frame.out + place, s.v)
                k.store(new + c * 4, s.v)

    def run_ref(self, args: Any, run: Any) -> None:
        x, out = (a.reshape(-1, args.stride)[:, : self.k] for a in (args.x, args.out))
        for part in run.parts:
            old, new = (
                args.states[part[name] * args.cell_bytes + args.layer_off :][: 4 * self.k]
                for name in ("state", "next")
            )
            s = old.view(np.float32) * np.float64(part["position"] > 0)
            for t in range(part["token"], part["token"] + part["n_tokens"]):
                s = args.decay[: self.k] * s + x[t]
                out[t] = s
            new.view(np.float32)[:] = s


# -- in plain numpy -------------------------------------------------------------------------------


def scanned(config: Config, i: int, x: Array, tensor: Callable[[str], Array]) -> Array:
    if config.layers[i].mixer == "attention":
        return mixed(config, i, x, tensor)
    maps = Layer(config, i, tensor)
    s = np.zeros(config.layers[i].n_ff)
    v = maps.linear(maps.norm(x, "mix_norm"), "mix_in")
    rows = []
    for row in v:
        s = tensor(f"blk.{i}.mix_decay.weight") * s + row
        rows.append(s)
    return x + maps.linear(np.array(rows), "mix_out")


def test_a_state_for_each_sequence(register: Register, tmp_path: Path) -> None:
    """Two texts in turn and together, in chunks and token by token."""
    register(ARCHS, "scanned", Arch("scanned", graph="scanned"))
    register(GRAPHS, "scanned", replace(DECODER, read=read))
    register(MIXERS, "decay", DECAY)
    register(WORDS, "decay", decay)
    write_model(tmp_path / "toy.gguf", "scanned")
    path = tmp_path / "toy.gguf"
    with treadle.load(path, threads=2, kv="f32", n_sequences=2) as model:
        engine = model.engine
        ids = text(50)
        other = text(60)[::-1]
        for n in (1, 512):
            model.plan(n).check()
        truth, second = (
            forward(model.gguf, model.config, all_, mix=scanned) for all_ in (ids, other)
        )
        found: list[np.ndarray] = []
        expected: list[np.ndarray] = []
        with closing(engine.cache.sequence()) as a, closing(engine.cache.sequence()) as b:
            for start, end in ((0, 20), (20, 21), (21, 22), (22, 49)):
                found.append(engine.run([BatchItem(a, ids[start:end], end - start)]))
                expected.append(truth[start:end])
            found.append(engine.run([BatchItem(a, ids[49:], 1), BatchItem(b, other[:30], 30)]))
            expected += [truth[49:], second[:30]]
            found.append(engine.run([BatchItem(b, other[30:], 30)]))
            expected.append(second[30:])
        truth = np.concatenate(expected)
        error = np.abs(np.concatenate(found) - truth).max() / np.abs(truth).max()
        assert error <= rounding(model.config)
