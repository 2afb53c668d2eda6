"""``python -m treadle``: the same as the ``treadle`` command."""

from __future__ import annotations

from treadle.cli import run_process

if __name__ == "__main__":
    run_process()
