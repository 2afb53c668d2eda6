"""Report of ``treadle doctor``: this machine, and every cause of lost speed with its cure."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from treadle import __version__
from treadle.devices.cpu import residence
from treadle.devices.cpu.tuned_rows import tuned_row
from treadle.isa import choose, runnable
from treadle.jit import cache
from treadle.jit.compile import compiler_versions
from treadle.jit.host import host_features
from treadle.jit.language import Isa
from treadle.machine import topology
from treadle.profiling import facts
from treadle.profiling.facts import Finding, Subject
from treadle.profiling.peaks import wanted_bytes

Report = dict[str, Any]

WALKED = 64 << 20  # bytes of a model from which the size of its pages matters


def row_in_use() -> Isa:
    """Return the instruction set that kernels are compiled for here."""
    return choose(host_features())


def describe(here: Subject) -> Report:
    """Return a machine's description as a dictionary for JSON.

    Its keys are the SECTIONS, without empty ones, and ``warnings``: each cause of lost speed and
    every fallback in use, with its cure, those of the model first.

    Raises UnsupportedError for a ``TREADLE_ISA`` that is unknown or cannot run there.
    """
    told = {name: list(section(here)) for name, section in SECTIONS.items()}
    report: Report = {
        name: dict(each for each in part if not isinstance(each, str))
        for name, part in told.items()
        if part
    }
    ranked = sorted(told, key=lambda name: name != "model")
    report["warnings"] = [each for name in ranked for each in told[name] if isinstance(each, str)]
    return report


def cache_facts(here: Subject) -> Iterator[Finding]:
    """Yield facts of the kernel cache: kernels in use and their size; old or damaged files.

    ``problem``: why kernels are not cached. ``compiling``: whether new ones may be compiled.
    """
    state = cache.state()
    compiling = os.environ.get("TREADLE_NO_COMPILE") != "1"
    yield "folder", state.folder
    yield "kernels", state.n_kernels
    yield "size_bytes", state.n_bytes
    yield "old_files", state.n_stale
    yield "old_size_bytes", state.stale_bytes
    yield "problem", state.problem
    if state.problem:
        then = "every process compiles its kernels" if compiling else "nothing can run"
        advice = "; set TREADLE_CACHE to a folder of your own"
        yield f"{state.problem}: {then}{'' if 'TREADLE_CACHE' in state.problem else advice}"
    yield "compiling", compiling
    if not compiling:
        yield "TREADLE_NO_COMPILE=1: a kernel that is not in the cache is an error; unset it"


def tuning_facts(here: Subject) -> Iterator[Finding]:
    """Yield the results of ``treadle tune`` here, if any; ``problem``: why they are not used."""
    row = tuned_row(here.isa, proc=here.proc)
    if row.measured is None and row.problem is None:
        return  # never tuned here
    yield "file", row.path
    yield "measured", row.measured
    yield "formats", row.formats
    yield "problem", row.problem
    if row.problem:
        yield f"the shipped tiles are used, not the tuned ones: {row.problem}"


def model_facts(here: Subject) -> Iterator[Finding]:
    """Yield facts of the model: its size, the share in memory and in huge pages, its weight formats
    and those without a kernel.

    ``problem``: why it cannot run at all.
    """
    model = here.model
    if model is None:
        return
    yield "files", [str(path) for path in model.files]
    if model.problem:
        yield f"treadle cannot run this model: {model.problem}"
    if model.without_kernel:
        yield (
            f"there is no kernel for {', '.join(model.without_kernel)} weights, so treadle cannot "
            f"run this file: use the model in {', '.join(model.instead)}"
        )
    size = sum(path.stat().st_size for path in model.files)
    in_memory = _total(residence.resident_bytes(path) for path in model.files)
    huge = _total(residence.huge_bytes(path) for path in model.files)
    yield "size_bytes", size
    yield "in_memory_bytes", in_memory
    yield "in_huge_pages_bytes", huge
    resident = in_memory or 0
    files = " ".join(shlex.quote(str(path)) for path in model.files)
    if short := residence.shortage(model.files, here.cgroup, here.proc):
        yield (
            f"the model ({size / 2**30:.1f} GiB) is larger than the memory available for it "
            f"({short.free_bytes / 2**30:.1f} GiB, for {short.bound.what}), so each token reads "
            f"from disk: {short.bound.cure}, or take a smaller format"
        )
    elif in_memory is not None and resident < topology.ENOUGH * size:
        yield (
            f"{resident / size:.0%} of the model is in memory: its first run reads the other "
            f"{(size - resident) / 2**30:.1f} GiB from disk; treadle doctor --reload {files} "
            "reads it in advance"
        )
    elif huge is not None and size > WALKED and huge < topology.ENOUGH * size:
        yield (
            f"{huge / size:.0%} of the model is in huge pages, the rest in small ones, as after "
            "copying or downloading; tokens take up to 10% longer: "
            f"treadle doctor --reload {files} reads the model again"
        )
    yield "formats", list(model.formats)
    yield "without_kernel", list(model.without_kernel)
    yield "problem", model.problem
    if model.chat is not None:
        yield "chat", dict(model.chat)
        if problem := model.chat["problem"]:
            yield problem


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of ``sizes``, or None if one of them is unknown (None)."""
    listed = list(sizes)
    return None if None in listed else sum(size or 0 for size in listed)


def peak_facts(here: Subject) -> Iterator[Finding]:
    """Yield the measured peaks, if any.

    ``read_from`` is "caches" if no larger buffer was available. ``processor_time_share`` is the
    share of processor time that the threads got.
    """
    peaks = here.peaks
    load = topology.load_average(here.proc)
    if peaks is None:
        return
    yield "q8_ops_s", peaks.q8
    if peaks.q16 is not None:
        yield "q16_ops_s", peaks.q16
    yield "bf16_ops_s", peaks.bf16
    if "bf16" in here.acts and peaks.bf16 is not None and peaks.bf16 < topology.ENOUGH * peaks.f32:
        rows = reversed(runnable(here.features))
        plain = next(row for row in rows if not (row.dot_bf16 or row.matrix))
        yield (
            f"this CPU's dots of bf16 run at {peaks.bf16 / peaks.f32:.0%} of its rate of f32: for "
            f"BF16 weights TREADLE_ISA={plain.name} reads prompts faster"
        )
    yield "f32_ops_s", peaks.f32
    yield "read_bytes_s", peaks.bytes_s
    if peaks.from_memory and peaks.stream_bytes_s:
        yield "stream_bytes_s", peaks.stream_bytes_s
    yield "read_from", "memory" if peaks.from_memory else "caches"
    yield "read_buffer_bytes", peaks.buffer_bytes
    wanted = wanted_bytes(here.cpus)
    usable = here.usable
    if usable is not None and peaks.buffer_bytes < wanted:
        largest = topology.cache_bytes(here.cpus)
        follows = (
            "so it may be a little too high"
            if peaks.from_memory
            else f"and a cache of {largest / 2**20:.0f} MiB holds most of that: it is the speed of "
            "caches, not of memory"
        )
        yield (
            f"the reading speed was measured on {peaks.buffer_bytes / 2**20:.1f} MiB, not on "
            f"{wanted / 2**20:.0f} MiB, {follows}. The reason is {usable.what}: {usable.cure}"
        )
    yield "processor_time_share", peaks.cpu_share
    average = "" if load is None else f" (load average {load})"
    so = f"{average}, so the peaks are too low; stop them and measure again"
    if warning := topology.busy_warning([peaks.cpu_share], so):
        yield warning


def version_facts(here: Subject) -> Iterator[Finding]:
    """Yield the versions of everything that results depend on."""
    import numpy as np

    yield "treadle", __version__
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    yield from compiler_versions().items()
    yield "numpy", np.__version__
    yield "system", f"{platform.system()} {platform.release()}"


SECTIONS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "cpu": facts.cpu_facts,
    "instruction_set": facts.isa_facts,
    "threads": facts.thread_facts,
    "processors": facts.processor_facts,
    "memory": facts.memory_facts,
    "kernel_cache": cache_facts,
    "tuning": tuning_facts,
    "model": model_facts,
    "peaks": peak_facts,
    "versions": version_facts,
}
