"""Another program beside treadle: code in an interpreter of its own, asked by lines of JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class Program:
    """A program that prints a line of JSON when it is ready, and one for each that it is given."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._line()

    def ask(self, *given: Any) -> Any:
        """Return its answer to a list of ``given``."""
        assert self.process.stdin is not None
        print(json.dumps(given), file=self.process.stdin, flush=True)
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the rival ended")
        return json.loads(line)


class Rival(Program):
    """``code``, run by the interpreter ``python`` with ``args``."""

    def __init__(self, python: str, code: str, *args: object) -> None:
        super().__init__(python, "-c", code, *args)
