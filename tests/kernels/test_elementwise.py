"""Embed, Norm and Pack against their numpy twins.

Tolerances. With u = 2**-24 a sum of n terms in chains of length c has an error of at most gamma_c
= c u / (1 - c u) times the sum of magnitudes; all terms of a mean square are positive, so that is
its relative error. What a row of q8 stores is within half a step, ``max|x| / 254``, of its value;
bf16 (8 bits) within 2**-8 of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call, step
from tests.kernels.pairwise import cases
from tests.kernels.registry import EMBEDS, NORMS, PACKS
from treadle.formats import by_name
from treadle.isa.isa import Isa
from treadle.kernels.activation_layout import (
    BLOCK,
    BYTE_TOP,
    BYTES,
    DWORDS,
    LOW_BITS,
    MAGIC_BITS,
    NARROW,
    OFFSET,
    PAIR,
    SPANNED,
    ActivationLayout,
    halves_ref,
    quantize_ref,
)
from treadle.kernels.elementwise.elementwise import Embed, Norm, Pack
from treadle.kernels.run_state import round_up
from treadle.selftest.rounding_bounds import (
    TWIN_ERROR,
    activation_error,
    centring_error,
    norm_error,
    stored_error,
)


def check_act(
    out: np.ndarray,
    act: ActivationLayout,
    exact: np.ndarray,
    relative: float,
    what: str,
    absolute: np.ndarray | float = 1e-37,
) -> None:
    """What ``out`` holds is ``exact [N, k]`` to the precision of its kind, and its sums belong to
    its quants.
    """
    n = len(exact)
    stored = act.read_ref(out, n)
    tolerance = stored_error(act, exact, relative, absolute)
    if act.kind in BYTES:
        check_sums(out, act, n, what)
    assert_close(stored, exact, tolerance, what)
    check_padding(out, act, n)


def check_sums(out: np.ndarray, act: ActivationLayout, n: int, what: str) -> None:
    groups = out[: act.n_bytes(n)].reshape(-1, act.group_bytes)
    sums = groups[:, act.comp_off : act.comp_off + 4 * act.ks * act.group].copy().view(np.int32)
    sums = sums.reshape(-1, act.ks, act.group).transpose(0, 2, 1).reshape(-1, act.ks)[:n]
    quants = act.dwords_ref(out, n).view(np.int8).astype(np.int32)
    assert quants.min(initial=0) >= -127, f"{what}: a quant of -128"
    if act.kind == "q8x2":
        high, low = np.split(quants, 2, axis=1)
        assert np.abs(low).max(initial=0) <= 1 << (LOW_BITS - 1), f"{what}: a large low part"
        quants = (high << LOW_BITS) + low
    expected = MAGIC_BITS - OFFSET * quants.reshape(n, act.ks, act.sub).sum(-1, dtype=np.int32)
    assert_close(sums, expected, 0.5, f"{what}: sums")


def check_padding(out: np.ndarray, act: ActivationLayout, n: int) -> None:
    """Zeros from K to the end of the last block: a product runs over them."""
    rows_ = act.dwords_ref(out, n).view(np.uint8)
    if act.kind in NARROW:
        blocks = rows_.view(np.uint16).reshape(n, -1, NARROW[act.kind], BLOCK)
        for part in range(NARROW[act.kind]):
            assert not blocks[:, :, part].reshape(n, -1)[:, act.k :].any()
        return
    if act.kind == "q16x2":
        pairs = rows_.reshape(n, -1, 2, PAIR)
        for part in range(2):
            assert not pairs[:, :, part].reshape(n, -1)[:, act.k :].any()
        return
    sizes = {**BYTES, "q16": 2, "q16n": 2, "f32": 4}
    assert not rows_[:, act.k * sizes[act.kind] :].any()


# -- Embed ----------------------------------------------------------------------------------------


def embed_cases() -> list[Any]:
    """Each format on each row: with one of its two widths, in turns, as the code that unpacks a
    block does not depend on it. Further specs of a format meet all rows.
    """
    of: dict[str, list[Embed]] = {}
    for spec in EMBEDS:
        of.setdefault(spec.w, []).append(spec)
    return [
        pytest.param(spec, row, id=f"{spec.name}-{row.name}")
        for specs in of.values()
        for turn, spec in enumerate(specs)
        for i, row in enumerate(rows.DISTINCT)
        if len(specs) == 1 or turn > 1 or (i + turn) % 2 == 0
    ]


@pytest.mark.parametrize(("spec", "isa"), embed_cases())
def test_embed(spec: Embed, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    fmt = by_name(spec.w)
    n_vocab = 7
    stride = spec.k + 5
    tokens = np.array([6, 0, 3, 3, 6], np.int32)
    run = Run(n_tokens=5, tokens=tokens)
    w = fmt.quantize_rows(rng.standard_normal((n_vocab, spec.k)).astype(np.float32))
    expected = np.full((5, stride), np.nan)
    parts = fmt.split(w)
    spec.run_ref(spec.args(w=parts, x=expected, stride=stride), run)
    for front in (False, True):
        x = memory.array((5, stride), np.float32, name="x", front=front)
        weights = tuple(memory.copy(part, name="w", front=front) for part in parts)
        call(spec, isa, memory, {"w": weights, "x": x, "stride": stride}, run, 5)
        # The code times d, plus m, times scale: three roundings, the sum's relative to its larger
        # part.
        size = np.abs(expected[:, : spec.k]) + np.abs(fmt.dequantize_rows(w)).max() * spec.scale
        assert_close(x[:, : spec.k], expected[:, : spec.k], 3 * U32 * size, spec.name)
        assert np.isnan(x[:, spec.k :]).all()


# -- Norm -----------------------------------------------------------------------------------------


@cases(NORMS, rows.DISTINCT)
def test_norm(spec: Norm, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n_tokens = 7
    stride = round_up(spec.k + 3, step(isa))
    run = Run(n_tokens=n_tokens, output_rows=np.array([6, 2, 5], np.int32))
    n = run["n_outputs" if spec.outputs else "n_tokens"]
    x = rng.standard_normal((n_tokens, stride)).astype(np.float32) * 3
    x[1] = 0  # a row of zeros has no direction
    x[3] += 100  # a mean that is large beside the distances from it
    vectors = {}
    if spec.weight:
        vectors["w"] = rng.standard_normal(spec.k).astype(np.float32)
    if spec.bias:
        vectors["bias"] = rng.standard_normal(spec.k).astype(np.float32)
    if spec.gain:
        vectors["gain"] = np.array([0.625], np.float32)  # exact: no error of its own but one
    residual = rng.standard_normal((n_tokens, stride)).astype(np.float32)
    x[:, spec.k :] = residual[:, spec.k :] = np.nan
    act = spec.layout()

    # The twin's exact values: f32 activations hold them to u.
    plain = replace(spec, act="f32", group=1)
    exact_out = np.full(plain.layout().n_bytes(n), 0xFF, np.uint8)
    as_rows = spec.add or spec.rows
    if as_rows:
        exact_out = np.full((n, stride), np.nan)
    given = {"x": x, **vectors, "residual": residual}
    plain.run_ref(plain.args(**given, out=exact_out, stride=stride), run)
    exact = exact_out[:, : spec.k] if as_rows else plain.layout().read_ref(exact_out, n)

    for front in (False, True):
        args: dict[str, Any] = {
            name: memory.copy(a, name=name, front=front) for name, a in given.items()
        }
        if as_rows:
            out = memory.array((n, stride), np.float32, name="out", front=front)
        else:
            out = memory.array(act.n_bytes(n), name="out", front=front)
        n_items = act.grid(1, "n_outputs" if spec.outputs else "n_tokens").items(run)
        args |= {"out": out, "stride": stride}
        call(spec, isa, memory, args, run, n if as_rows else n_items)
        relative = norm_error(spec.k, isa) + U32
        rows_ = x[run.output_rows if spec.outputs else slice(n), : spec.k].astype(np.float64)
        off = centring_error(spec, isa, rows_, vectors.get("w", np.ones(spec.k)))
        # A bias and the product it is added to may cancel: the product has the larger error.
        off = off + relative * np.abs(vectors.get("bias", np.zeros(spec.k)))
        if as_rows:
            before = residual[:n, : spec.k].astype(np.float64) * spec.add
            before = before * vectors.get("gain", 1.0)
            tolerance = off + np.abs(exact - before) * relative + 2 * U32 * np.abs(exact)
            assert_close(out[:, : spec.k], exact, tolerance, spec.name)
            assert np.isnan(out[:, spec.k :]).all()
        else:
            check_act(out, act, exact, relative, spec.name, off * (1 + 2.0**-8) + 1e-37)


def test_norm_in_place(memory: Memory, rng: np.random.Generator) -> None:
    """``add`` may write over its own residual: the plan does."""
    spec = next(s for s in NORMS if s.add)
    isa = rows.DISTINCT[-1]
    x = memory.copy(rng.standard_normal((3, spec.k)).astype(np.float32))
    w = memory.copy(np.ones(spec.k, np.float32))
    residual = memory.copy(rng.standard_normal((3, spec.k)).astype(np.float32))
    expected = np.empty((3, spec.k))
    run = Run(n_tokens=3)
    args = {"x": x, "w": w, "residual": residual, "stride": spec.k}
    spec.run_ref(spec.args(**args, out=expected), run)
    call(spec, isa, memory, {**args, "out": residual}, run, 3)
    assert_close(residual, expected, 1e-5, spec.name)


# -- Pack -----------------------------------------------------------------------------------------


@cases(PACKS, rows.DISTINCT)
def test_pack(spec: Pack, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 8
    up = round_up(spec.k + 2, step(isa))
    stride = round_up(up + spec.k + 1, step(isa))
    x = rng.standard_normal((n, stride)).astype(np.float32) * 4
    x[2] = 0
    run = Run(n_tokens=n)
    act = spec.layout()
    plain = replace(spec, act="f32", group=1)
    exact_out = np.empty(plain.layout().n_bytes(n), np.uint8)
    wide = round_up(stride + 7, step(isa))
    others: dict[str, Any] = {"apart_stride": wide} if spec.apart else {}
    apart = rng.standard_normal((n, wide)).astype(np.float32)
    ups = apart if spec.apart else x
    given = {"stride": stride, "up": up, **others, "apart": apart if spec.apart else None}
    plain.run_ref(plain.args(x=x, out=exact_out, **given), run)
    exact = plain.layout().read_ref(exact_out, n)
    relative = activation_error(spec.fn)
    # The twin's 1 + tanh cancels for negative y, where the kernel's sigmoid does not.
    gate = ups[:, up : up + spec.k] if spec.gated else 1.0
    absolute = np.abs(x[:, : spec.k] * gate) * TWIN_ERROR + 1e-37
    for front in (False, True):
        rows_ = memory.copy(x, name="x", front=front)
        out = memory.array(act.n_bytes(n), name="out", front=front)
        n_items = act.grid(spec.slices, "n_tokens").items(run)
        args = {**given, "x": rows_, "out": out}
        if spec.apart:
            args["apart"] = memory.copy(apart, name="apart", front=front)
        call(spec, isa, memory, args, run, n_items)
        check_act(out, act, exact, relative, spec.name, absolute)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("kind", DWORDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_not_lost(
    kind: str, bad: float, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A block of q8, or a span of q16, with a NaN or an infinity in it dequantises to nothing
    finite but zeros.
    """
    spec = Pack("copy", kind, 96, 32 if kind == "q16x2" else 6)
    act = spec.layout()
    for place in (32, 37, 63):
        x = rng.standard_normal((2, 96)).astype(np.float32)
        x[1, place] = bad
        out = memory.array(act.n_bytes(2), name="out")
        args = {"x": memory.copy(x), "out": out, "stride": 96, "up": 0}
        call(spec, isa, memory, args, Run(n_tokens=2), 2)
        with np.errstate(invalid="ignore"):
            got = act.read_ref(out, 2)
        assert not np.isfinite(got[1, place])
        good = np.ones((2, 96), bool)
        good[1, slice(None) if kind in SPANNED else slice(32, 64)] = False
        assert_close(got[good], x[good], np.abs(x[good]).max() * 2.0**-7, spec.name)


# -- the layout's own twin ------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("kind", DWORDS)
def test_act_round_trip(kind: str, group: int, rng: np.random.Generator) -> None:
    act = ActivationLayout(kind, 96, group)
    x = rng.standard_normal((7, 96)).astype(np.float32)
    out = np.full(act.n_bytes(7), 0xFF, np.uint8)
    act.write_ref(out, x)
    check_act(out, act, x.astype(np.float64), 0.0, f"{kind} x {group}")


@pytest.mark.parametrize("kind", BYTES)
def test_the_largest_values_of_bytes_are_symmetric(kind: str) -> None:
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64) * np.float32(3.3e38)
    q, d = quantize_ref(x, kind)
    assert q.min() == -BYTE_TOP[kind]
    assert q.max() == BYTE_TOP[kind]
    assert np.isfinite(d).all()


def test_every_value_of_two_bytes_is_their_sum() -> None:
    q = np.arange(-BYTE_TOP["q8x2"], BYTE_TOP["q8x2"] + 1)
    high, low = (part.astype(np.int32) for part in halves_ref(q))
    assert np.array_equal((high << LOW_BITS) + low, q)
    assert (high.min(), high.max(), low.min(), low.max()) == (-127, 127, -64, 63)
