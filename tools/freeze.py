"""Hashes of all kernels' IR and of all small models' plans, to show that a move changes neither.

    python tools/freeze.py before.json
    python tools/freeze.py after.json --compare before.json

Kernels are the specs that tests/kernels, formats, isa, profiling and devices/cpu are
parametrised with, on each instruction set. Plans are the steps of every GGUF file under
``../shared/data``, for 1 and 16 tokens. The exit status is 1 if a hash differs or is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import treadle  # noqa: E402
from tests.kernels import ahead  # noqa: E402
from treadle.errors import TreadleError  # noqa: E402
from treadle.jit.kernel import trace  # noqa: E402

FOLDERS = (
    "tests/kernels",
    "tests/formats",
    "tests/isa",
    "tests/profiling",
    "tests/devices/cpu",
)


class Collector:
    """A pytest plugin that keeps the specs of a collection."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pairs = ahead.wanted(session.items)


def hash_of(pair: tuple[Any, Any]) -> tuple[str, str]:
    spec, isa = pair
    try:
        text = trace(spec, isa)
    except TreadleError as error:
        text = str(error)
    return f"ir {isa.name} {spec.name}", sha256(text.encode()).hexdigest()[:16]


def plan_hashes(path: Path) -> list[tuple[str, str]]:
    found = []
    for n in (1, 16):
        try:
            with treadle.load(path, threads=2, context=64) as model:
                steps = [repr(step) for step in model.plan(min(n, model.engine.max_tokens))]
            text = re.sub(r"<[^<>]* at 0x\w+>|\b[A-Z]\w*(?=\()", "", "\n".join(steps))
        except (TreadleError, ValueError) as error:
            text = f"{type(error).__name__}: {error}".replace(str(path.parent), "")
        found.append((f"plan {path.name} {n}", sha256(text.encode()).hexdigest()[:16]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    os.chdir(ROOT)
    collector = Collector()
    folders = [folder for folder in FOLDERS if (ROOT / folder).is_dir()]
    pytest.main(["--collect-only", "-qq", "-p", "no:randomly", *folders], plugins=[collector])
    models = sorted((ROOT.parent / "shared/data").rglob("*.gguf"))
    found: dict[str, str] = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found |= dict(pool.map(hash_of, collector.pairs, chunksize=20))
        for hashes in pool.map(plan_hashes, models):
            found |= dict(hashes)
    options.out.write_text(json.dumps(found, indent=0, sort_keys=True))
    print(len(found), "hashes")
    if options.compare:
        before = json.loads(options.compare.read_text())
        differing = sorted(name for name, value in before.items() if found.get(name) != value)
        print(len(differing), "differ:", *differing[:20], sep="\n  ")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
