"""The instructions of a warm start, by imported package and by phase.

::

    python bench/start_counted.py MODEL.gguf                # packages and phases
    python bench/start_counted.py MODEL.gguf --modules 40   # and the 40 modules that take most

The command is ``treadle run MODEL hello -n 1`` in one thread, as ``bench/gate.py`` counts it, under
valgrind's callgrind. Counts do not depend on what else the machine does. Each import and each phase
of ``bench/start_marks.py`` begins and ends with a call of ``getppid``, at which callgrind writes
down the instructions since the last call: a module's count leaves out the modules that it imports,
a phase's leaves out imports and other phases. Marks take some 5 % more. Starts before it fill
caches of its own, and are not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle-start-counted"
PACKAGES = ("treadle", "numpy", "click", "tokenizers")
CALLGRIND = ("valgrind", "--tool=callgrind", "--dump-before=getppid")
Part = tuple[str, str, int]  # "module" or "phase", its name, and instructions


def counted(words: list[str], variables: dict[str, str]) -> list[Part]:
    """Run treadle under callgrind; return what was done between each mark and the next."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"
        marks.touch()
        out = Path(folder) / "out"
        child = [sys.executable, str(Path(__file__).with_name("start_marks.py")), str(marks)]
        subprocess.run(
            [*CALLGRIND, f"--callgrind-out-file={out}", *child, *words],
            check=True,
            env=os.environ | variables,
            capture_output=True,
        )
        dumps = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [total(path) for path in dumps]
        if out.exists():
            totals.append(total(out))
        lines = marks.read_text("utf-8").splitlines()
    # Each dump has the instructions before its mark; the first one has Python's own start.
    parts = [("phase", "Python", totals[0])]
    stack: list[tuple[str, str]] = []
    for line, number in zip(lines, totals[1:], strict=True):
        if line.startswith("+"):
            _, kind, name = line.split(" ", 2)
            stack.append((kind, name))
        else:
            stack.pop()
        parts.append((*stack[-1], number))
    return parts


def total(path: Path) -> int:
    """Return the instructions of one dump."""
    for line in path.read_text("utf-8", "replace").splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise SystemExit(f"{path}: callgrind wrote no total")


def package(name: str) -> str:
    """Return the line of the table that a module belongs to."""
    top = name.partition(".")[0]
    return top if top in PACKAGES else "Python's library"


def show(parts: list[Part], n_modules: int) -> None:
    """Print packages, phases and the modules that take most, in million instructions."""
    modules, lines = Counter[str](), Counter[str]()
    for kind, name, number in parts:
        if kind == "module":
            modules[name] += number
        lines[f"import {package(name)}" if kind == "module" else name] += number
    counts = Counter(package(name) for name in modules)
    print(f"{'':34} {'million':>8} {'modules':>8}")
    for name, number in lines.items():
        n = counts[name.removeprefix("import ")] if name.startswith("import ") else ""
        print(f"{name:34} {number / 1e6:8.1f} {n:>8}")
    print(f"{'all':34} {sum(lines.values()) / 1e6:8.1f} {len(modules):8}")
    for name, number in modules.most_common(n_modules):
        print(f"  {name:32} {number / 1e6:8.2f}")


def main() -> None:
    """Fill the caches, count a start, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--modules", type=int, default=0, metavar="N")
    parser.add_argument("--source", default=str(ROOT / "src"), help="of another working tree")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("there is no valgrind")
    variables = {
        "PYTHONPATH": args.source,
        "PYTHONPYCACHEPREFIX": str(CACHE / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",  # as if not set
        "PYTHONHASHSEED": "0",  # counts depend on it
        "TREADLE_CACHE": str(CACHE / "kernels"),
    }
    words = ["run", args.model, "hello", "-n", "1", "-t", "1"]
    command = ["valgrind", "--tool=none", sys.executable, "-m", "treadle", *words]
    subprocess.run(command, check=True, env=os.environ | variables, capture_output=True)
    show(counted(words, variables), args.modules)


if __name__ == "__main__":
    main()
