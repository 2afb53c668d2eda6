"""The child of ``bench/start_counted.py``: treadle's command line with a mark, a call of
``getppid``, at the beginning and the end of each import and each phase.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib import _bootstrap  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

# Phases of a start: functions by module, and the name of the phase.
PHASES = {
    "treadle.cli.app:invoke": "command line",
    "treadle.api.model:Model.__init__": "load, the rest",
    "treadle.api.options:open_found": "header of the file",
    "treadle.models.stored_config:open_config": "configuration",
    "treadle.engine.engine:Engine.__init__": "engine and pools",
    "treadle.cli.commands.run:begin": "prompt to request",
    "treadle.tokenizer.tokenizer:load_tokenizer": "tokenizer",
    "treadle.devices.cpu.device:Cpu._plan": "plan",
    "treadle.devices.cpu.device:Cpu.ready": "kernels and threads",
    "treadle.cli.commands.run:stream": "run, sampling, text",
}
MARKS = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND)


def mark(line: str) -> None:
    """Write a line to the file of marks, and call ``getppid``."""
    os.write(MARKS, line.encode() + b"\n")
    os.getppid()


def marked(function: Callable[..., Any], kind: str, name: str = "") -> Callable[..., Any]:
    """Return ``function`` with marks. ``name``: by default its first argument."""

    def call(*args: Any, **settings: Any) -> Any:
        mark(f"+ {kind} {name or args[0]}")
        try:
            found = function(*args, **settings)
            if isinstance(found, ModuleType):
                mark_phases(found)
            return found
        finally:
            mark("-")

    return call


def mark_phases(module: ModuleType) -> None:
    """Mark the functions of ``PHASES`` that a module has."""
    for place, phase in PHASES.items():
        home, _, path = place.partition(":")
        if home == module.__name__:
            *outer, function = path.split(".")
            owner: Any = module
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, function, marked(getattr(owner, function), "phase", phase))


if __name__ == "__main__":
    _bootstrap._find_and_load_unlocked = marked(_bootstrap._find_and_load_unlocked, "module")
    mark("+ phase treadle's first lines")
    runpy.run_module("treadle", run_name="__main__", alter_sys=True)
