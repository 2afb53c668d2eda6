"""``treadle check`` on models that are right, and on a machine that spoils a step's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.loras import draw_pairs, write_gguf
from tests.selftest.checks import SMALL, kernels_of
from treadle.devices.cpu.device import Cpu
from treadle.kernels.attention.paged import Attention
from treadle.kernels.run_state import PAGE, SPLIT
from treadle.models.control_vector import ControlVector
from treadle.selftest import twin_results
from treadle.selftest.model_check import CheckReport, check_kernels, check_model
from treadle.selftest.texts import check_text
from treadle.selftest.thread_check import check_threads


def test_nothing_is_wrong(path: Path) -> None:
    with treadle.load(path, **SMALL) as model:
        report = check_model(model, quick=True)
    assert report.failures == []
    assert report.passed
    assert all(each.n_values for each in report.kernels)
    assert report.threads is not None
    assert report.threads.counts[:2] == (1, 2)
    assert report.text is not None
    assert (len(report.text.ids), report.text.known) == (12, False)
    assert report.text.apart < 1e-3  # of F32 weights, and pages of f16


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arch", "weights", "kernel"),
    [
        ("mamba2", "F32", "mamba2"),
        ("rwkv7", "F32", "wkv_out"),
        ("qwen3moe", "Q8_0", "combine"),
        ("deepseek2", "F32", "latent"),
        ("glm-dsa", "F32", "choose"),
        ("qwen4exp", "F32", "ngram_rows"),
        ("deepseek4", "F32", "row_attention"),
        ("bert", "F32", "pool"),
    ],
)
def test_other_models(tiny: WriteTiny, arch: str, weights: str, kernel: str) -> None:
    sizes = {"n_expert": 4, "n_ff_exp": 64} if arch == "qwen3moe" else {}
    report = kernels_of(tiny(arch, weights, **sizes))
    assert report.failures == []
    names = " ".join(sorted({each.kernel for each in report.kernels}))
    assert kernel in names


def test_adapters_and_control_vectors(path: Path, tmp_path: Path) -> None:
    """The twins run the text with the model's own ones, as the kernels do."""
    lora = write_gguf(tmp_path / "one.gguf", draw_pairs(path, 4, 4))
    rows = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    vector = ControlVector("v", {1: rows[0], 2: rows[1]}, "llama")
    for given in ({"lora": [lora]}, {"control_vectors": [vector]}):
        with treadle.load(path, **SMALL, **given) as model:
            found = check_text(model)
        assert (found.problem, found.skipped) == ("", "")
        assert found.apart < 1e-3


@pytest.mark.slow
def test_kernels_of_adapters_and_control_vectors(path: Path, tmp_path: Path) -> None:
    lora = write_gguf(tmp_path / "one.gguf", draw_pairs(path, 4, 4))
    vector = ControlVector("v", {1: np.ones(64, np.float32)}, "llama")
    with treadle.load(path, **SMALL, lora=[lora], control_vectors=[vector]) as model:
        report = CheckReport({}, {}, quick=True)
        check_kernels(model, report)
    assert report.failures == []
    names = " ".join(sorted({each.kernel for each in report.kernels}))
    assert "add_directions" in names
    assert "lora_down" in names


def test_sums_with_rows_of_a_norm(tiny: WriteTiny) -> None:
    """Behind a norm whose rows no padding widens, a product or a sum of experts adds the norm's own
    rows: f32 in a buffer of bytes.
    """
    report = kernels_of(tiny("nomic-bert-moe", "F32", n_embd=128))
    assert report.failures == []


@pytest.mark.parametrize(
    ("arch", "n_top"),
    [
        ("deepseek32", 12),
        ("glm-dsa", 12),
        ("axk2", 12),
        ("dots3note", 12),
        pytest.param("hy_v4", 12, marks=pytest.mark.slow),
        ("minimax-m3", 1),  # the last block alone
    ],
)
def test_parts_without_a_chosen_key(
    arch: str, n_top: int, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long history is split into parts, of which an indexer chooses no key of some."""
    n_empty = 0

    def compared(evidence: Any, cut: Any) -> Iterator[Any]:
        nonlocal n_empty
        for each in compare(evidence, cut):
            if each.what == "partials":
                n_empty += int((each.expected[:, -1] == 0).sum())
            yield each

    compare = twin_results.COMPARISONS[Attention]
    monkeypatch.setitem(twin_results.COMPARISONS, Attention, compared)
    report = kernels_of(tiny(arch, "F32", n_top=n_top), context=SPLIT + 5 * PAGE)
    assert n_empty
    assert report.failures == []


def test_a_tower(data: Path) -> None:
    folder = data / "media" / "qwen3vl"
    report = CheckReport({}, {}, quick=True)
    with treadle.load(folder / "text.gguf", mmproj=folder / "mmproj.gguf", **SMALL) as model:
        check_kernels(model, report)
    assert report.failures == []
    assert any("rows" in each.where for each in report.kernels), {e.where for e in report.kernels}


@pytest.mark.parametrize(
    ("kernel", "n_wrong"),
    [
        ([1.0 + 2.0**-23, 2.5, 3.0], 0),  # the twin's first result rounds to the state before
        ([1.0, 2.5, 4.0], 1),  # the last is another sequence's
        ([1.0, 2.0, 3.0], 1),  # the second was not written
    ],
)
def test_states_beside_those_before(kernel: list[float], n_wrong: int) -> None:
    def of(values: list[float]) -> np.ndarray:
        return np.array(values, np.float32).view(np.uint8)

    before = {"states": of([1.0, 2.0, 3.0])}
    twin: Any = SimpleNamespace(states=of([1.0, 2.5, 3.0]))
    spec = SimpleNamespace(args=SimpleNamespace(writes=()), k=64)
    evidence: Any = SimpleNamespace(
        spec=spec, changing=before, changed={"states": of(kernel)}, twin=lambda: twin
    )
    (found,) = twin_results.compare(evidence, twin_results.Cut())
    assert (found.excess() > 1).sum() == n_wrong


class Faulty(Cpu):
    """A machine whose arithmetic is wrong in one place: ``spoil`` changes a step's result."""

    spoil: Callable[[Any, Any, int, int], None]

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        for step in steps:
            super()._run(program, range(step, step + 1), times, False)
            type(self).spoil(self, program, step, self.n_threads)
        return True

    def ready(self, plan: Any, arena: Any, inputs: Any) -> Any:
        program: Any = super().ready(plan, arena, inputs)
        program.plan = plan
        program.arena = arena
        return program


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let every CPU device be a Faulty one with this ``spoil``."""

    def use(spoil: Any) -> None:
        monkeypatch.setattr(Faulty, "spoil", staticmethod(spoil), raising=False)
        monkeypatch.setattr("treadle.devices.cpu.device.Cpu", Faulty)

    return use


def test_a_fault_in_a_later_layer_alone_is_in_the_text(
    path: Path, spoiled: Callable[[Any], None]
) -> None:
    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "L1.ffn.down":
            (y,) = of.writes
            at = program.plan.offsets[y]
            program.arena.bytes[at : at + 32].view(np.float32)[:] = 3.0

    spoiled(spoil)
    with treadle.load(path, **SMALL) as model:
        report = check_model(model, quick=True)
    # The first layer's steps stand for those of all layers, which have the same kernels.
    assert all(each.passed for each in report.kernels)
    assert report.text is not None
    assert report.text.problem
    assert "differ" in report.text.problem or "token" in report.text.problem
    assert report.as_dict()["verdict"] == "failed"


def test_the_first_wrong_value_is_told(path: Path, spoiled: Callable[[Any], None]) -> None:
    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "L0.ffn.down":
            (y,) = of.writes
            at = program.plan.offsets[y] + 4 * 5
            program.arena.bytes[at : at + 4].view(np.float32)[:] = 1e3

    spoiled(spoil)
    found = kernels_of(path)
    wrong = [each for each in found.kernels if not each.passed]
    assert {each.label for each in wrong} == {"L0.ffn.down"}
    for each in wrong:
        assert each.n_wrong == 1
        assert each.first_wrong is not None
        assert each.first_wrong.where == "y: row 0, column 5"
        assert each.first_wrong.found == 1e3
        assert abs(each.first_wrong.expected) < 100
    assert wrong[0].kernel in found.failures[0]
    assert "y: row 0, column 5: 1000, expected" in found.failures[0]


def test_bits_that_depend_on_threads(path: Path, spoiled: Callable[[Any], None]) -> None:
    """The lowest bit of one logit, on two threads."""

    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "output" and n_threads == 2:
            (y,) = of.writes
            at = program.plan.offsets[y] + 4 * 7
            program.arena.bytes[at : at + 4].view(np.uint32)[:] ^= 1

    spoiled(spoil)
    with treadle.load(path, **SMALL) as model:
        problem = check_threads(model, quick=True).problem
    assert problem.startswith("2 threads give other bits than 1: the prompt's result, value 7: ")
