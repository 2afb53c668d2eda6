"""``treadle check`` on emulated rows: every kernel of a model's plans beside its twin, and the
same bits on several numbers of threads. Python stays here, and kernels run in a guest.

By default two rows run a tiny model. With TREADLE_EMULATED=all every row runs all batch sizes of
the packaged model, and its known text; and the whole command runs on emulated CPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import WriteTiny
from tests.emulated.device import GuestCpu
from tests.emulated.foreign import run_python
from tests.emulated.rows import EMULATED
from tests.emulated.test_models import CPUS
from treadle.engine.engine import Engine
from treadle.engine.prepared_plan import PlanKey
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config
from treadle.selftest.kernel_check import KernelCheck, Selection
from treadle.selftest.model_check import QUICK, QUICK_MANY, check_plan
from treadle.selftest.texts import PACKAGED, text_of
from treadle.selftest.thread_check import compared, runs_of

EVERY = os.environ.get("TREADLE_EMULATED") == "all"
DEMO = Path(__file__).resolve().parents[2] / "src/treadle/data/demo.gguf"
ROWS = list(EMULATED) if EVERY else ["neon_i8mm", "rvv256"]


def engine_on(row: str, path: Path, threads: int) -> Engine:
    gguf = open_gguf(path)
    device = GuestCpu(EMULATED[row], threads)
    return Engine(gguf, load_config(gguf), device, n_ctx=560, n_sequences=4)


def keys_of(engine: Engine) -> list[PlanKey]:
    """A text, some texts, a prompt; with ``EVERY`` all sizes."""
    sizes = [*engine.few, engine.max_tokens]
    chosen = sizes if EVERY else [sizes[0], sizes[-1]]
    return [PlanKey(n, min(n, 128), "logits") for n in chosen]


@pytest.fixture
def path(tiny: WriteTiny) -> Path:
    return DEMO if EVERY else tiny("llama", "Q8_0", formats=(("ffn", "Q4_0"),), n_layer=1)


def kernels_on(row: str, path: Path) -> list[KernelCheck]:
    engine = engine_on(row, path, 2)
    selection = Selection()
    found = []
    for key in keys_of(engine):
        found += check_plan(engine, key, selection, QUICK, QUICK_MANY)
    engine.close()
    return found


@pytest.mark.parametrize("row", ROWS)
def test_kernels_are_as_their_twins(row: str, path: Path) -> None:
    found = kernels_on(row, path)
    assert [k for k in found if not k.passed] == []
    assert {k.kernel.partition("_")[0] for k in found} >= {"embed", "norm", "gemv", "attention"}
    assert any(k.kernel.startswith("gemm") for k in found)


@pytest.mark.parametrize("row", ROWS)
def test_bits(row: str, path: Path) -> None:
    counts = (1, 2, 3) if EVERY else (1, 3)
    results: list[tuple[int, np.ndarray]] = []
    for n in counts:
        engine = engine_on(row, path, n)
        results += [(n, rows) for rows in runs_of(engine, 1)]
        engine.close()
    assert compared(results, counts).problem == ""


@pytest.mark.skipif(not EVERY, reason="minutes: with TREADLE_EMULATED=all")
@pytest.mark.parametrize("row", EMULATED)
def test_known_text(row: str) -> None:
    engine = engine_on(row, DEMO, 1)
    said = text_of(engine, list(PACKAGED.prompt), PACKAGED)
    assert (said.problem, said.ids) == ("", PACKAGED.ids)
    engine.close()


@pytest.mark.skipif(not EVERY, reason="minutes each: with TREADLE_EMULATED=all")
@pytest.mark.parametrize(("machine", "cpu", "row"), CPUS, ids=[row for _, _, row in CPUS])
def test_the_command(machine: str, cpu: str, row: str, tmp_path: Path) -> None:
    script = 'from treadle.cli import main; raise SystemExit(main(["check", "--quick", "--json"]))'
    report = json.loads(run_python(machine, cpu, tmp_path / "cache", "-c", script))
    assert (report["verdict"], report["machine"]["isa"]) == ("passed", row)
    assert report["text"]["known"]
