"""Runs the blocks of one page, in order and in one process: ``python page_runner.py BLOCKS``.

BLOCKS is a JSON file: a list of objects with ``kind`` ("bash" or "python"), ``text``, ``name`` (for
tracebacks) and ``serve`` (whether the block starts a server and leaves it running). What each block
prints goes to a file beside it, ``BLOCKS.out.N``.

A line that is one plain ``treadle`` command runs in this process: starting Python for each would
take most of the time. All others are bash's, which finds ``treadle`` and ``python`` in ``bin``.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SHELL = re.compile(r"[|&;<>()$`*?~#!]|^\w+=")  # what makes a line more than a command
ADDRESS = re.compile(r"http://127\.0\.0\.1:(?:8080|8000|11434)")
READY_S = 120.0
SMALL_BYTES = 8 << 20
# A reader that has enough (`| head`) is no failure of the program before it.
PIPES = """
treadle() { command treadle "$@" || { code=$?; [ $code = 141 ] || return $code; }; }
curl() { command curl "$@" || { code=$?; [ $code = 23 ] || return $code; }; }
"""


class PageServer:
    """A ``treadle serve`` that a page starts: on any free port, until the page's end."""

    def __init__(self, command: str) -> None:
        words = shlex.split(re.sub(r"--port \d+", "", command))
        environment = os.environ | {"TREADLE_SERVE_PORT": "0"}
        self.log: list[str] = []
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        killer = threading.Timer(READY_S, self.process.kill)
        killer.start()
        self.url = self.process.stdout.readline().strip()
        killer.cancel()
        if not self.url.startswith("http"):
            self.stop()
            raise SystemExit(f"{command}: no address: {''.join(self.log)}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def stop(self) -> None:
        """Stop it, and wait for its end."""
        self.process.terminate()
        self.process.wait()
        self._reader.join()


def run_command(line: str) -> int:
    """Run a ``treadle`` command here, with this process's standard output. Return its exit code."""
    from treadle.cli import main

    if re.match(r"treadle (bench|check|doctor|plan)\b", line):
        from treadle.profiling import peaks

        # The speed of caches will do; memory's is read in gigabytes.
        peaks.BUFFER_BYTES = (SMALL_BYTES, SMALL_BYTES)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b""), "utf-8")
    return main(shlex.split(line)[1:])


def run_bash(text: str, out: Path) -> int:
    """Run a text as a script of bash. Return its exit code."""
    with out.open("ab") as file:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", PIPES + text], stdout=file, stdin=subprocess.DEVNULL
        ).returncode


def is_plain(text: str) -> bool:
    """Return whether all lines of a block are ``treadle`` commands without anything of a shell."""
    lines = text.replace("\\\n", " ").splitlines()
    plain = all(line.startswith("treadle ") for line in lines if line.strip())
    return plain and not any(SHELL.search(re.sub(r"\"[^\"$`]*\"", "", line)) for line in lines)


def run_block(block: dict[str, Any], out: Path, names: dict[str, Any]) -> None:
    """Run one block; raises SystemExit or the block's own exception if it fails."""
    # Whether a repository has a projector that is not here yet is asked of the network.
    text = block["text"].replace("treadle pull ", "treadle pull --no-mmproj ")
    if block["kind"] == "python":
        kept = sys.stdout
        with out.open("w", encoding="utf-8") as file:
            sys.stdout = file
            try:
                exec(compile(text, block["name"], "exec", dont_inherit=True), names)
            finally:
                sys.stdout = kept
        return
    if not is_plain(text):
        code = run_bash(text, out)
        if code:
            raise SystemExit(f"{block['name']}: exit code {code}")
        return
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        kept = sys.stdout
        with out.open("a", encoding="utf-8") as file:
            sys.stdout = file
            try:
                code = run_command(line)
            finally:
                sys.stdout = kept
        if code:
            raise SystemExit(f"{block['name']}: {line}: exit code {code}")


def main() -> None:
    """Run all blocks; servers end with the page, or when the next one starts."""
    path = Path(sys.argv[1])
    blocks = json.loads(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, str(Path.cwd()))
    server: PageServer | None = None
    try:
        for number, block in enumerate(blocks):
            out = path.with_name(f"{path.name}.out.{number}")
            out.touch()
            if block["serve"]:
                if server is not None:
                    server.stop()
                server = PageServer(block["text"].strip())
                os.environ["TREADLE_URL"] = server.url
                continue
            if server is not None:
                block["text"] = ADDRESS.sub(server.url, block["text"])
            run_block(block, out, names)
    finally:
        if server is not None:
            server.stop()


if __name__ == "__main__":
    main()
