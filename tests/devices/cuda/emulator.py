"""A GPU played by one core of this machine: for tests, and to say what ``Isa.simt`` means.

A block's threads are coroutines (``emulated_thread.py`` here) that a compiled loop resumes,
warp by warp and thread by thread in an order that a seed shuffles, each until it waits. So a
barrier that is missing shows as another result with another seed. Shared memory is NaN before each
block.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from tests.devices.cuda.records import (
    COPY,
    ENDED,
    FAULT,
    FAULTS,
    LANE,
    LAUNCH,
    MOST_COPIES,
    PAD,
    THREAD,
)
from tests.kernels.quick_code import emit_quickly, linker
from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.launch_args import (
    PerBlock,
    dynamic_shared_bytes,
    gpu_source_hash,
    scratch_bytes,
    threads_of,
)
from treadle.isa import choose
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.jit import cache
from treadle.jit.host import host_features
from treadle.jit.kernel import isa_key, symbol
from treadle.kernels.spec import Spec

ALIGN = 128
_launching = Lock()


class Fault(AssertionError):
    """A kernel did what no GPU would do, or not twice alike."""


def emulated(row: Isa) -> Isa:
    """The instruction set that this machine plays: the numbers of ``row``, a GPU's, by which a plan
    is made, with portable operations.
    """
    from tests.devices.cuda.emulated_thread import EMULATED

    host = choose(host_features())
    names = "vector_bits regs tiles fused rounds dot4_least dot4_top dot_bf16"
    return replace(
        PORTABLE,
        name=f"{row.name}_emulated",
        cpu=host.cpu,
        features=host.features,
        simt=EMULATED,
        **{name: getattr(row, name) for name in names.split()},
    )


@dataclass(frozen=True)
class Kernel:
    """One spec's code: what ``launch`` runs."""

    spec: Spec
    isa: Isa
    address: int

    def launch(
        self,
        args: int,
        run: int,
        *,
        items: range | None = None,
        count: int = 0,
        base: int = 1,
        per: int = 1,
        scratch: int = 0,
        n_ctas: int = 4,
        seed: int = 0,
    ) -> None:
        """Do a step: its grid's items, or ``items``; the other arguments are addresses.

        ``scratch`` is that of all threads of all blocks. Raises Fault.
        """
        first = 0
        if items is not None:
            assert isinstance(self.spec, PerBlock), self.spec
            first = items.start
            count = 0
            base = items.stop
            per = 1
            scratch -= n_scratch(self.spec, self.isa, first)
        with _launching:
            fault = _run(self, (args, run, count, base, per, scratch), first, n_ctas, seed)
        if fault["kind"]:
            raise Fault(_told(self, fault))


def load(spec: Spec, isa: Isa) -> Kernel:
    """A kernel for the emulator: from the cache, else compiled."""
    return Kernel(spec, isa, _address(spec, isa, isa_key(isa)))


def n_scratch(spec: Spec, isa: Isa, n_ctas: int) -> int:
    """Bytes of scratch that a launch of so many blocks needs."""
    return scratch_bytes(spec, isa) * threads_of(spec) * n_ctas


_linked: dict[tuple[str, str], int] = {}


def _address(spec: Spec | None, isa: Isa, key: str) -> int:
    """Where a kernel's thread is, or with none the loop that resumes threads."""
    from tests.devices.cuda.trace import SCHEDULER, trace_scheduler, trace_thread

    name = spec.name if spec else SCHEDULER
    entry = symbol(spec) if spec else SCHEDULER
    if (key, name) not in _linked:
        kept = f"{key}\0threads\0{gpu_source_hash()}"
        code = cache.read(name, kept)
        if code is None:
            text = trace_thread(spec, isa)[0] if spec else trace_scheduler(isa)
            code = emit_quickly(text, isa)
            cache.write(name, kept, code, {"isa": isa.name})
        _linked[key, name] = linker().link(entry, code)
    return _linked[key, name]


class _Block:
    """Memory for one block's threads, kept from launch to launch."""

    def __init__(self, n_threads: int, n_shared: int, n_frame: int) -> None:
        self.arrays = {
            "threads": np.zeros(n_threads, THREAD),
            "shared": np.zeros(n_shared + 2 * PAD + ALIGN, np.uint8),
            "frames": np.zeros(n_threads * n_frame + ALIGN, np.uint8),
            "exchange": np.zeros(n_threads * 2 * LANE + ALIGN, np.uint8),
            "copies": np.zeros(n_threads * MOST_COPIES, COPY),
            "handles": np.zeros(n_threads, np.int64),
        }

    def address(self, name: str) -> int:
        """Bytes begin at a multiple of ALIGN."""
        at = int(self.arrays[name].ctypes.data)
        return at + -at % ALIGN if self.arrays[name].dtype == np.uint8 else at


@lru_cache(maxsize=64)
def _block(address: int, n_threads: int, n_shared: int) -> tuple[_Block, int]:
    """A kernel's block, and the bytes of a thread's frame."""
    asked = np.zeros(1, THREAD)  # with no room: it says how much it needs
    pointers = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 3
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, *pointers)(address)
    function(0, 0, 0, 0, 0, 0, 0, int(asked.ctypes.data))
    n_frame = -(-int(asked["frame"][0]) // 128) * 128
    return _Block(n_threads, n_shared, n_frame), n_frame


def _run(kernel: Kernel, given: tuple[int, ...], first: int, n_ctas: int, seed: int) -> Any:
    n_threads = threads_of(kernel.spec)
    n_shared = -(-dynamic_shared_bytes(kernel.spec) // 16) * 16
    assert n_threads % 32 == 0, n_threads
    block, n_frame = _block(kernel.address, n_threads, n_shared)
    launch = np.zeros(1, LAUNCH)
    fault = np.zeros(1, FAULT)
    launch["function"] = kernel.address
    for name, value in zip(("args", "run", "count", "base", "per", "scratch"), given, strict=True):
        launch[name] = value
    launch["begin"] = first
    launch["end"] = first + n_ctas
    launch["n_ctas"] = n_ctas
    launch["n_threads"] = n_threads
    launch["n_shared"] = n_shared
    launch["n_frame"] = n_frame
    for name in block.arrays:
        launch[name] = block.address(name)
    launch["shared"] += PAD
    launch["seed"], launch["fault"] = seed, int(fault.ctypes.data)
    isa = replace(kernel.isa, name=PORTABLE.name)  # one loop for all rows
    scheduler = _address(None, isa, isa_key(isa))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(scheduler)(int(launch.ctypes.data))
    return fault[0]


def _told(kernel: Kernel, fault: Any) -> str:
    """A fault in words, with the kernel's lines that it is about."""
    from tests.devices.cuda.trace import trace_thread

    places = trace_thread(kernel.spec, kernel.isa)[1]

    def where(place: int) -> str:
        if place == ENDED:
            return "its end"
        number = place // 4
        return places[number - 1] if 0 < number <= len(places) else "the end"

    text = f"{kernel.spec.name}: {FAULTS[int(fault['kind'])]} (block {int(fault['cta'])}, "
    text += f"thread {int(fault['tid'])}"
    if fault["place"]:
        text += f", at {where(int(fault['place']))}"
    if fault["other"]:
        text += f"; another at {where(int(fault['other']))}"
    return text + ")"
