"""Builds a bundle: pex packs the program, and the model is put before it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from treadle.base.fast_classes import dataclass
from treadle.bundle import wheels
from treadle.bundle.wheels import ANY_PYTHON, Target
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.bundled import START, BundleHeader, read_bundled
from treadle.files.gguf import open_gguf
from treadle.files.target import check_room, check_target, new_file
from treadle.system import NAME

Say = Callable[[str], None]
PIECE = 1 << 20  # bytes copied at once
MAIN = "__main__.py"
START_MODULE = "treadle.cli.bundled"
# The shell script at the start of a bundle. If the program is unpacked in the usual folder, it
# starts at once: Python would take 0.1 s to read the archive first. front.py does the rest.
SCRIPT = """\
n=ID-$(uname -m)
b="${PEX_ROOT:-${TREADLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/treadle}/bundles}"
if [ -O "$b" ] && [ -O "$b/$n" ] && read -r p < "$b/$n" && [ -x "$p" ]; then
    export PEX="$0" TREADLE_BUNDLE="$n" TREADLE_BUNDLES="$b"
    exec "$p" -I -m treadle.cli.bundled "$@"
fi
if { [ "$(wc -c < "$0")" -lt BYTES ]; } 2> /dev/null; then
    echo "treadle: error: $0: truncated (expected BYTES bytes)" >&2
    exit 1
fi
for p in python3 PYTHONS; do
    $p -ISc '' > /dev/null 2>&1 && exec $p "$0" "$@"  # pyenv has names that run nothing
done
echo "treadle: error: no python3 found: install CPython 3.10 or newer" >&2
exit 1
"""


@dataclass(frozen=True)
class BuiltBundle:
    """A written bundle: its size (``n_bytes``) and those of its parts in bytes, the machines it
    runs on (``targets``), and the command that it starts.
    """

    path: Path
    n_bytes: int
    program_bytes: int
    model_bytes: int
    targets: tuple[Target, ...]
    command: str


def make_bundle(
    model: Path,
    out: Path,
    *,
    serve: bool = False,
    args: Sequence[str] = (),
    targets: Sequence[Target] = (),
    force: bool = False,
    say: Say = lambda text: None,
) -> BuiltBundle:
    """Write the program and the model as one executable file, ``out``; ``force``: replace an
    existing file.

    With ``targets`` the bundle runs on these, with wheels from the package registry; without, on
    this machine's architecture and Python version, with the packages installed here. It starts the
    server with ``serve``; ``args`` are default arguments of the command. ``say`` is called with a
    text at each stage. Raises FileError, UnsupportedError (a model in several files; not on Linux),
    TreadleError (no pex, no network).
    """
    if NAME != "linux":
        raise UnsupportedError(
            f"bundles can only be made on Linux, and run on Linux: this is {NAME}"
        )
    missing = [name for name in ("pex", "packaging") if find_spec(name) is None]
    if missing:
        raise TreadleError(f"a bundle needs {' and '.join(missing)}: pip install 'treadle[bundle]'")
    check_target(out, [model], force=force)
    bundled = describe(model, serve, args)
    extras = frozenset({"serve"} if find_spec("uvicorn") else ())
    if serve and not extras:
        raise TreadleError("--serve needs the server: pip install 'treadle[serve]'")
    check_room(out, bundled.n_bytes)
    with tempfile.TemporaryDirectory(prefix="treadle-bundle-") as name:
        folder = Path(name)
        (folder / "wheels").mkdir()
        own = wheels.own_wheel(folder / "wheels")
        if targets:
            say(f"fetching wheels for {', '.join(map(str, targets))}")
            fetch(own, extras, targets, folder)
        else:
            say("packing the installed packages")
            for project, found in wheels.closure(extras).items():
                if project != "treadle":
                    wheels.installed_wheel(found, folder / "wheels")
        program = pack(folder, extras, targets)
        archive = folder / "program.zip"
        own_id = digest(program)
        runs_on = targets or [wheels.this_target()]
        add_front(program, archive, own_id, runs_on)
        n_program = archive.stat().st_size
        need = bundled.start + bundled.n_bytes + START + n_program
        check_room(out, need)
        with new_file(out, need) as file:
            whole = -(-(bundled.start + bundled.n_bytes) // START) * START + n_program
            file.write(bundled.head(script(own_id, runs_on, whole)))
            write(file, model, bundled, archive)
            os.chmod(file.fileno(), 0o755)
            n_bytes = file.tell()
    return BuiltBundle(out, n_bytes, n_program, bundled.n_bytes, tuple(runs_on), bundled.command)


def describe(model: Path, serve: bool, args: Sequence[str]) -> BundleHeader:
    """Return the bundle's header for ``model``, which is opened as a check. ``serve``: the bundle
    starts the server; ``args``: default arguments. Raises FileError, and UnsupportedError unless it
    is a single GGUF file.
    """
    if model.is_dir() or model.suffix == ".safetensors":
        raise UnsupportedError(
            f"{model}: a bundle needs a single GGUF file: make one with 'treadle convert {model} "
            "FILE'"
        )
    with open_gguf(model) as gguf:
        if len(gguf.paths) > 1:
            raise UnsupportedError(
                f"{model}: the model has {len(gguf.paths)} files, and a bundle needs one: join "
                "them with "
                f"'treadle convert {model} FILE'"
            )
        if gguf.header_only:
            raise FileError(
                "the file ends after the header", path=model, expected="a complete model"
            )
        talks = "tokenizer.chat_template" in gguf.metadata
    with model.open("rb") as file:
        inside = read_bundled(file, model)  # the model is itself in a bundle
    command = "serve" if serve else "chat" if talks else "run"
    if inside:
        return BundleHeader(inside.name, START, inside.n_bytes, command, tuple(args))
    return BundleHeader(model.name, START, model.stat().st_size, command, tuple(args))


def fetch(own: Path, extras: frozenset[str], targets: Sequence[Target], folder: Path) -> None:
    """Download wheels for the targets into ``folder/wheels``, from the registry that pip is
    configured for. ``own`` is treadle's wheel, ``extras`` are its extras whose packages are
    included.

    All targets use the versions that the oldest Python accepts: pex requires one version of each
    pure Python package.
    """
    wanted = f"{own}[{','.join(sorted(extras))}]" if extras else str(own)
    oldest, *others = sorted(targets, key=lambda target: target.python)
    _download(wanted, [oldest], folder, "--exclude", ANY_PYTHON)
    pins = folder / "pins.txt"
    pure = (path.stem.split("-") for path in (folder / "wheels").glob("*-none-any.whl"))
    lines = [f"{name}=={version}" for name, version, *_ in pure if name != "treadle"]
    pins.write_text("\n".join(lines) + "\n")
    if others:
        _download(wanted, others, folder, "--exclude", ANY_PYTHON, "--constraints", str(pins))
    first = {target.machine: target for target in reversed(targets)}
    _download(wheels.requirement(ANY_PYTHON), [*first.values()], folder, "--intransitive")
    for path in sorted((folder / "wheels").glob(f"{ANY_PYTHON}-*.whl")):
        wheels.any_python(path)


def _download(wanted: str, targets: Sequence[Target], folder: Path, *more: str) -> None:
    platforms = [word for target in targets for word in ("--complete-platform", target.complete())]
    _pex(
        ["pex.cli", "download", wanted, "-d", str(folder / "wheels"), "--no-build", *more],
        [*platforms, "--use-pip-config"],
        folder,
        "the wheels cannot be downloaded (--offline packs the installed packages, for this "
        "machine)",
    )


def pack(folder: Path, extras: frozenset[str], targets: Sequence[Target]) -> Path:
    """Pack the wheels in ``folder/wheels``, treadle's with ``extras``, as an application for
    ``targets``, ``program.pex``, and return its path. pex unpacks it into a virtual environment on
    its first run.
    """
    result = folder / "program.pex"
    wanted = f"treadle[{','.join(sorted(extras))}]" if extras else "treadle"
    platforms = [word for target in targets for word in ("--complete-platform", target.complete())]
    _pex(
        ["pex", wanted, "--no-index", "--pre-resolved-dists", str(folder / "wheels")],
        [
            "--no-pre-install-wheels",
            "--venv",
            "-m",
            "treadle.cli.bundled",
            "-o",
            str(result),
            *platforms,
        ],
        folder,
        "pex cannot pack the program",
    )
    return result


def _pex(command: list[str], more: list[str], folder: Path, failure: str) -> None:
    """Run the pex command ``command`` with the options ``more``; it writes nothing outside of
    ``folder``. Raises TreadleError, which begins with the text ``failure``.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PEX")}
    done = subprocess.run(
        [sys.executable, "-m", *command, *more, "--pex-root", str(folder / "pex")],
        env={**env, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "")
        raise TreadleError(f"{failure}: {told}")


def digest(path: Path) -> str:
    """Return the id of the program in the file ``path``: 32 hex digits of the file's SHA-256."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return state.hexdigest()[:32]


def script(name: str, targets: Sequence[Target], n_bytes: int) -> bytes:
    """Return the shell script at the beginning of the bundle ``name``, a file of ``n_bytes`` for
    the Python versions of ``targets``.
    """
    versions = sorted({target.python for target in targets}, reverse=True)
    pythons = " ".join("python{}.{}".format(*version) for version in versions)
    values = {"ID": name, "PYTHONS": pythons, "BYTES": str(n_bytes)}
    return re.sub("|".join(values), lambda found: values[found[0]], SCRIPT).encode()


def add_front(program: Path, to: Path, name: str, targets: Sequence[Target]) -> None:
    """Copy the archive ``program`` to ``to``, with ``front.py`` inserted before pex's own first
    lines. ``name``: the id under which the program is unpacked; ``targets``: the machines and
    Python versions that ``front.py`` accepts.
    """
    front = Path(__file__).with_name("front.py").read_text("utf-8")
    values = {
        "BUNDLE": name,
        "PYTHONS": sorted({target.python for target in targets}),
        "MACHINES": sorted({target.machine for target in targets}),
    }
    for field, value in values.items():
        front, n = re.subn(rf"^{field} = .*$", f"{field} = {value!r}", front, flags=re.MULTILINE)
        assert n == 1, field
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(to, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename == MAIN:
                data = front.encode() + data
            is_packed = info.filename.endswith(".whl")
            info.compress_type = zipfile.ZIP_STORED if is_packed else zipfile.ZIP_DEFLATED
            new.writestr(info, data)


def write(file: IO[bytes], model: Path, bundled: BundleHeader, program: Path) -> None:
    """Append the model (``bundled.n_bytes`` bytes, also if ``model`` is a bundle itself), padding
    and the program to ``file``, which holds the header.
    """
    with model.open("rb") as source:
        inside = read_bundled(source, model)
        source.seek(inside.start if inside else 0)
        left = bundled.n_bytes
        while left:
            piece = source.read(min(left, PIECE))
            if not piece:
                raise FileError("the file shrank while it was copied", path=model)
            file.write(piece)
            left -= len(piece)
    file.write(b"\0" * (-file.tell() % START))
    with program.open("rb") as source:
        shutil.copyfileobj(source, file, PIECE)
