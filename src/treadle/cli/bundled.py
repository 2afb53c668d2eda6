"""Entry point of a bundle: treadle's command line with the bundled model filled in."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from treadle.files.bundled import BundleHeader, read_bundled

# Commands whose first argument is a MODEL.
OF_MODELS = {
    "run",
    "chat",
    "serve",
    "bench",
    "inspect",
    "show",
    "plan",
    "diff",
    "doctor",
    "tokenize",
    "perplexity",
    "imatrix",
    "control-vector",
    "rerank",
    "embed",
    "warm",
    "check",
}
MODES = {"--cli": "run", "--chat": "chat", "--server": "serve"}  # llamafile's
GENERAL = {"-h", "--help", "--version"}


def arguments(
    typed: Sequence[str], own: str, bundled: BundleHeader, commands: Sequence[str], talks: bool
) -> list[str]:
    """Return the command line of ``treadle`` for a bundle that was called with ``typed``.

    ``own``: the bundle's path, which takes the place of MODEL. ``bundled``: its command and default
    arguments, used if ``typed`` does not begin with one of ``commands``. ``talks``: standard input
    is a terminal; else the command ``chat`` becomes ``run``.
    """
    first, rest = (typed[0], list(typed[1:])) if typed else ("", [])
    if first in GENERAL:
        return list(typed)
    if first in commands or first in MODES:
        command = MODES.get(first, first)
    else:
        command = bundled.command
        rest = [*bundled.args, *typed]
        if command == "chat" and (typed or not talks):
            command = "run"  # a prompt, or one from a pipe
    name = ["--alias", bundled.name.removesuffix(".gguf")]
    if command == "batch" and not any(word.startswith(("-m", "--model")) for word in rest):
        return [command, "--model", own, *name, *rest]  # else the packaged model would answer
    if command not in OF_MODELS:
        return [command, *rest]
    return [command, own, *(name if command == "serve" else []), *rest]


def own_file() -> Path:
    """Return the path of the bundle that this process was started from."""
    return Path(os.path.realpath(os.environ.get("PEX") or sys.argv[0]))


def remember(folder: str | None) -> None:
    """Record in ``folder`` which Python ran the unpacked program, so that ``bundle/front.py``
    starts it at once the next time. Do nothing if ``folder`` is None or cannot be written.
    """
    name = os.environ.get("TREADLE_BUNDLE")
    if folder and name and not os.path.exists(os.path.join(folder, name)):
        with suppress(OSError):  # the next start is only slower
            part = Path(folder, f"{name}.{os.getpid()}")
            part.write_text(sys.executable + "\n")
            part.replace(Path(folder, name))


def keep_kernels(folder: str | None) -> None:
    """Cache compiled kernels in the subfolder ``kernels`` of ``folder`` if the usual cache folder
    is not writable. Do nothing if ``folder`` is None.
    """
    from treadle.errors import CacheError
    from treadle.jit import cache

    try:
        usable = os.access(cache.checked_folder(), os.W_OK | os.X_OK)
    except CacheError:
        usable = False
    if folder and not usable:
        os.environ["TREADLE_CACHE"] = os.path.join(folder, "kernels")


def main() -> None:
    """Run the command line as a whole process."""
    from treadle.cli import run_process
    from treadle.cli.app import COMMANDS

    folder = os.environ.get("TREADLE_BUNDLES")
    remember(folder)
    keep_kernels(folder)
    own = own_file()
    with own.open("rb") as file:
        bundled = read_bundled(file, own)
    if bundled is None:
        sys.exit(f"treadle: error: {own} is not a bundle")
    sys.argv[1:] = arguments(sys.argv[1:], str(own), bundled, [*COMMANDS], sys.stdin.isatty())
    run_process()


if __name__ == "__main__":
    main()
