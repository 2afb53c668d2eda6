"""A machine's own tiles, in plans and in engines: other kernels, the same results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import WriteTiny
from tests.engine.test_engine import engine_of, prefill, text
from tests.stepwise import walk
from tests.tiny import write_model
from treadle.devices.cpu.tuned_rows import save
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS
from treadle.formats import Format, by_name
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.select import TunedTable, matmul
from treadle.kernels.matmul.select_activation import has_matrix_act
from treadle.kernels.run_state import GEMV_TOKENS
from treadle.plan.plan import Plan
from treadle.profiling.report import row_in_use

FORMATS = ("Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16")
MIXED = "mixed"
ISA = row_in_use()
# Each format its own tile, so that no two share a layout, and its own crossover.
TABLE = TunedTable(
    {w: {"mr": 1, "nr": nr} for nr, w in enumerate(FORMATS, 2)},
    {(w, n): {"mr": 1} for w in FORMATS for n in GEMV_TOKENS},
    {w: (1, 2, 4)[i % 3] for i, w in enumerate(FORMATS)},
    {w: {"mr": 2 + 2 * (i % 2)} for i, w in enumerate(FORMATS) if has_matrix_act(by_name(w), ISA)},
)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TREADLE_TUNE", raising=False)


@pytest.fixture
def model(tiny: WriteTiny, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A small model of one format, or one whose matrices are each of another."""
    if request.param != MIXED:
        return tiny("llama", request.param)
    kinds: Iterator[str] = cycle(FORMATS)

    def next_format(name: str) -> Format:
        return by_name(next(kinds) if name == MIXED else name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tiny.by_name", next_format)
        write_model(tmp_path / "mixed.gguf", fmt=MIXED)
    return tmp_path / "mixed.gguf"


def family(spec: Matmul) -> str:
    """Gated products are tiled as others are."""
    return spec.product.op


def products(plan: Plan) -> list[Matmul]:
    return [step.spec for step in plan if isinstance(step.spec, Matmul)]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("model", [*FORMATS, MIXED], indirect=True)
def test_the_row_changes_kernels_and_no_results(model: Path) -> None:
    """For every size of batch: one, a few, some, a prompt. Where a format's crossover is low,
    batches of a few tokens are tiled, and a tile is written past their end.
    """
    save(ISA, TABLE)
    with engine_of(model) as engine:
        for n in (*GEMV_TOKENS, 16, 40, 200):
            plan = engine.plan(n, min(n, OUTPUTS))
            plan.check()
            for spec in products(plan):
                met = min(n, OUTPUTS) if spec.outputs else n
                tokens = met if met < 40 else 99 if met <= OUTPUTS else 512
                chosen = matmul(by_name(spec.w), engine.device.isa, spec.k, tokens, TABLE)
                assert (family(spec), spec.mr, spec.nr) == (chosen.op, chosen.mr, chosen.nr)
        for n in (1, 2, 3, 4, 9, 40, 200):
            sequence = engine.cache.sequence()
            worst = max(
                walk(engine, [BatchItem(sequence, text(n), min(n, OUTPUTS))]),
                key=lambda step: step.error,
            )
            assert worst.error <= 1, f"{n} tokens: {worst.label} ({worst.kind}): {worst.error}"
            sequence.close()


@pytest.mark.usefixtures("own_cache")
def test_a_variable_puts_the_row_aside(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    save(ISA, TABLE)
    names = []
    for value in ("1", "0"):
        monkeypatch.setenv("TREADLE_TUNE", value)
        with engine_of(tiny("llama", "Q8_0")) as engine:
            names.append({spec.name for spec in products(engine.plan(200))})
    assert not names[0] & names[1]


@pytest.mark.usefixtures("own_cache")
def test_determinism_survives_a_row(tiny: WriteTiny) -> None:
    """Tiled whatever the batch, with the machine's own tile; vectors that add as matrix registers
    do have tiles for each count of tokens.
    """
    save(ISA, TABLE)
    with engine_of(tiny("llama", "Q8_0"), deterministic=True) as engine:
        ids = text(30)
        rows = [prefill(engine, ids, n) for n in (1, 2, 7, 30)]
        nr = 1 if has_matrix_act(by_name("Q8_0"), ISA) else 2
        assert {(family(s), s.nr) for s in products(engine.plan(1))} == {("gemm", nr)}
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])


@pytest.mark.usefixtures("own_cache")
def test_a_row_that_is_refused_is_as_none(tiny: WriteTiny) -> None:
    save(ISA, TABLE).write_text("{")
    with engine_of(tiny("llama", "Q8_0")) as engine:
        for spec in products(engine.plan(200, 1))[:-1]:  # the last is the output's
            chosen = matmul(by_name(spec.w), engine.device.isa, spec.k, 512)
            assert (spec.mr, spec.nr) == (chosen.mr, chosen.nr)
