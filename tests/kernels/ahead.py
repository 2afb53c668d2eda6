"""Compiles the kernels of a run's tests in a process of its own, the last test's first: most tests
use one core, and half their time goes by compiling. A test whose kernel is not there compiles it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.quick_code import is_made_up, quick_object
from treadle.isa.isa import Isa
from treadle.jit.kernel import object_code
from treadle.kernels.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
FEW = 20  # kernels that are not worth a process


def wanted(items: Iterable[pytest.Item]) -> list[tuple[Any, Any]]:
    """Specs and instruction sets that tests are parametrised with, each once; a GPU's kernels begin
    otherwise, and are no objects.
    """
    found = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        spec = params.get("spec")
        isa = params.get("isa")
        if isinstance(spec, Spec) and isinstance(isa, Isa) and isa.simt is None:
            found[spec.name, isa.name] = spec, isa
    return list(found.values())


@contextmanager
def compiling(items: Iterable[pytest.Item]) -> Iterator[None]:
    """Meanwhile, into the cache that TREADLE_CACHE names. Emulated rows have one of their own."""
    pairs = wanted(items)[::-1]
    if len(pairs) < FEW or "TREADLE_TEST_ROW" in os.environ:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.ahead", str(os.getpid())],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    try:
        with suppress(OSError), process.stdin as pipe:
            pickle.dump(pairs, pipe)
        yield
    finally:
        process.terminate()
        process.wait()


def main(parent: int) -> None:
    """The process: it ends with the one that has started it."""
    os.nice(10)
    for spec, isa in pickle.load(sys.stdin.buffer):
        if os.getppid() != parent:
            return
        with suppress(Exception):  # the test will say it
            quick_object(spec, isa) if is_made_up(isa) else object_code(spec, isa)


if __name__ == "__main__":
    main(int(sys.argv[1]))
