"""The check of a whole model: kernels, threads, text, speeds; and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import CompileError, DeviceError
from treadle.selftest.batches import MANY, RandomStates, batch_of
from treadle.selftest.kernel_check import (
    NO_RESULT,
    KernelCheck,
    Note,
    PlanRun,
    Selection,
    check_steps,
)
from treadle.selftest.machine_facts import machine_facts
from treadle.selftest.speeds import SpeedCheck, measure_speeds
from treadle.selftest.texts import TextCheck, check_text
from treadle.selftest.thread_check import ThreadCheck, check_threads
from treadle.selftest.tower_runs import tower_runs
from treadle.selftest.twin_results import Cut

if TYPE_CHECKING:
    from treadle.api.engine_plans import EnginePlan
    from treadle.api.model import Model
    from treadle.engine.engine import Engine
    from treadle.engine.prepared_plan import PlanKey

Progress = Callable[[str, int, int], None]
QUICK = Cut(weights=1 << 18, rows=32, experts=4, items=6)
QUICK_MANY = 40  # tokens of a batch in a plan for many
FORMAT = 1  # of the report


@dataclass
class CheckReport:
    """The findings of ``treadle check``.

    machine: facts of the CPU, the system and the versions; no names of users, files or hosts.
    kernels: each kernel against its numpy twin. threads: equality of bits across thread counts.
    text: a generated text against the twins', or a known one. speeds: None if not measured.
    cut: the parts that were not checked, in words. errors: parts that ended with an error.
    """

    machine: dict[str, Any]
    model: dict[str, Any]
    quick: bool
    kernels: list[KernelCheck] = field(default_factory=list)
    threads: ThreadCheck | None = None
    text: TextCheck | None = None
    speeds: SpeedCheck | None = None
    cut: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Each thing that is wrong, in a sentence; [] if all is right."""
        found = [
            f"kernel {k.kernel} ({k.label}, {k.where}) is wrong: {k.n_wrong} of {k.n_values} values"
            + (
                f", the first at {k.first_wrong.where}: {k.first_wrong.found:.9g}, expected "
                f"{k.first_wrong.expected:.9g} within {k.first_wrong.allowed:.3g}"
                if k.first_wrong
                else ""
            )
            for k in self.kernels
            if not k.passed
        ]
        for part in (self.threads, self.text):
            if part is not None and part.problem:
                found.append(part.problem)
        return [*found, *self.errors]

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON: the fields, whether each kernel passed, the failures, and the
        verdict, "passed" or "failed".
        """
        made = asdict(self)
        for kernel, record in zip(self.kernels, made["kernels"], strict=True):
            record["passed"] = kernel.passed
        return {
            "format": FORMAT,
            "verdict": "passed" if self.passed else "failed",
            "failures": self.failures,
            **made,
        }


def check_model(
    model: Model,
    *,
    quick: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> CheckReport:
    """Check everything of ``model`` on this machine; see ``CheckReport``.

    ``quick``: fewer batch sizes, fewer values, no speeds. ``note`` is called with each kernel's
    name and place before it runs, so that a kernel that ends the process can be named. Load the
    model with ``n_sequences=4``, so that batches of several texts fit. A kernel that cannot be
    compiled, and a device that fails, are failures of the report. Raises CacheError, and FileError
    if a file of the model cannot be read.
    """
    began = time.perf_counter()
    report = CheckReport(machine_facts(model), model_facts(model), quick)

    def add_threads() -> None:
        report.threads = check_threads(model, quick=quick, progress=progress)

    def add_text() -> None:
        report.text = check_text(model, quick=quick, progress=progress)

    def add_speeds() -> None:
        report.speeds = measure_speeds(model, progress)

    parts = {
        "kernels": lambda: check_kernels(model, report, progress, note),
        "threads": add_threads,
        "text": add_text,
        "speeds": add_speeds,
    }
    if quick:
        del parts["speeds"]
    for name, part in parts.items():
        try:
            part()
        except (CompileError, DeviceError) as error:
            report.errors.append(f"{name}: {error}")
    report.seconds = time.perf_counter() - began
    return report


def model_facts(model: Model) -> dict[str, Any]:
    """Return the model's name, architecture, sizes, weight formats and KV format, by name; no
    path.
    """
    from treadle.api.summary import bytes_by_type

    config = model.config
    tensors = list(model.gguf.tensors.values())
    return {
        "name": str(model.gguf.metadata.get("general.name", "")),
        "architecture": config.arch.name,
        "n_layer": len(config.layers),
        "n_embd": config.n_embd,
        "n_vocab": config.n_vocab,
        "formats": list(bytes_by_type(tensors)),
        "n_bytes": int(model.gguf.n_bytes),
        "kv": model.engine.cache.kv,
    }


# -- kernels --------------------------------------------------------------------------------------


def check_kernels(
    model: Model,
    report: CheckReport,
    progress: Progress | None = None,
    note: Note | None = None,
) -> None:
    """Check each kernel of the model's plans and of its towers against its twin; add the results to
    ``report.kernels``, and the parts not checked to ``report.cut``.
    """
    from treadle.api.engine_plans import media_plans, text_plans

    plans = [*text_plans(model)]
    if model.media is not None:
        plans += media_plans(model)
    if report.quick:
        plans = _few(plans)
        report.cut.append("batches of other sizes: --quick takes the smallest and the largest")
    many = QUICK_MANY if report.quick else MANY
    cut = QUICK if report.quick else Cut()
    selection = Selection()
    named: set[str] = set()
    for done, plan in enumerate(plans):
        if progress is not None:
            progress("check kernels", done, len(plans))
        found = check_plan(plan.engine, plan.key, selection, cut, many, report.cut, note)
        report.kernels += found
        named |= {spec.name for spec in plan.lower().specs() if not isinstance(spec, NO_RESULT)}
    for tower, of in enumerate(tower_runs(model)):
        named |= {spec.name for spec in of.plan.specs()}
        selection.batch = ("tower", tower)
        report.kernels += check_steps(of, selection, cut, note)
    idle = named - {kernel.kernel for kernel in report.kernels}
    if idle:
        report.cut.append(f"kernels that no batch had work for: {', '.join(sorted(idle))}")
    n_cut = sum(kernel.n_cut for kernel in report.kernels)
    if n_cut:
        n_values = sum(kernel.n_values for kernel in report.kernels)
        report.cut.append(
            f"the twins computed a part of the rows, experts and items of large steps: "
            f"{n_values:,} values of {n_values + n_cut:,}; the first, the last, and others by a "
            "seed. The kernels computed all"
        )
    if progress is not None:
        progress("check kernels", len(plans), len(plans))


def _few(plans: Iterable[EnginePlan]) -> list[EnginePlan]:
    """Return, for each engine and kind of plan, the first and the last of ``plans``, which ascend
    by size.
    """
    by_kind: dict[Any, list[EnginePlan]] = {}
    for plan in plans:
        by_kind.setdefault((id(plan.engine), plan.key[2:]), []).append(plan)
    return [p for each in by_kind.values() for p in dict.fromkeys((each[0], each[-1]))]


def check_plan(
    engine: Engine,
    key: PlanKey,
    selection: Selection,
    cut: Cut,
    many: int = MANY,
    remarks: list[str] | None = None,
    note: Note | None = None,
) -> list[KernelCheck]:
    """Check the kernels of the plan of ``key``, except steps that ``selection`` has seen, with a
    batch of at most ``many`` tokens, and return their comparisons. ``cut``: limits of the twins'
    work; ``note``: see ``check_model``. Adds to ``remarks`` the part of the plan's size that the
    batch does not use.
    """
    rng = np.random.default_rng(0)
    with engine.lock, batch_of(engine, key, rng, many) as batch:
        ready = batch.ready
        selection.batch = id(engine), batch.n_tokens
        if remarks is not None and batch.cut and batch.cut not in " ".join(remarks):
            remarks.append(f"a batch has {batch.cut}")
        given = RandomStates(key.output, rng)

        def before() -> None:
            given.before_run(ready)
            if ready.run.media is not None:
                _fill_media(ready.run.media, rng)
                ready.write_media()

        of = PlanRun(
            engine.device, ready.plan, ready.program, ready.arena, ready.run, batch.name, before
        )
        found = list(check_steps(of, selection, cut, note))
        engine.check_files()
        return found


def _fill_media(media: np.ndarray, rng: np.random.Generator) -> None:
    """Make every second row of a batch's ``media``, f32, a random row of a picture."""
    from treadle.kernels.run_state import MEDIA_HEAD

    media[:, MEDIA_HEAD:] = rng.standard_normal(media[:, MEDIA_HEAD:].shape)
    media[:, 0] = np.arange(len(media)) % 2


def results_by_kernel(kernels: Iterable[KernelCheck]) -> Iterator[list[KernelCheck]]:
    """Yield lists of the results of each kernel, in the order in which the kernels were first
    checked.
    """
    grouped: dict[str, list[KernelCheck]] = {}
    for each in kernels:
        grouped.setdefault(each.kernel, []).append(each)
    yield from grouped.values()
