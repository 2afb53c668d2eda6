"""``python -m tests.server.paced FILE ...``: the real command line, whose server takes half a
second for a step as long as FILE is there. So a text is still being written however slow a test is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from treadle.server.requests.engine_thread import EngineThread

STEP_S = 0.5


def pace(file: Path) -> None:
    """In this process, for good. Prompts are read at full speed."""
    step = EngineThread._step

    def slow(self: EngineThread) -> None:
        if file.exists() and any(output.answer.ids for output in list(self.outputs.values())):
            time.sleep(STEP_S)
        step(self)

    EngineThread._step = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    from treadle.cli import run_process

    pace(Path(sys.argv.pop(1)))
    run_process()
