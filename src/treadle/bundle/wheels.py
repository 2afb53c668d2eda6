"""Wheels for a bundle: rebuilt from installed packages, or for other machines from the registry.

treadle's own wheel is made of the running sources, so that a bundle behaves like the treadle that
built it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as installed
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import treadle
from treadle.base.fast_classes import dataclass
from treadle.base.humanize import listed
from treadle.errors import TreadleError
from treadle.system import machine

LEFT_OUT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # about this installation only
PYTHONS = tuple((3, minor) for minor in range(10, 15))
MACHINES = ("x86_64", "aarch64")
GLIBC = range(31, 4, -1)  # wheels for glibc 2.31 and older
# Its wheels for each Python differ only in their names, because it is not an extension module: one
# serves all, which saves 60 MB per Python.
ANY_PYTHON = "llvmlite"


def plain(name: str) -> str:
    """Return the normalised name of a distribution: lower case, with hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(extras: frozenset[str]) -> dict[str, installed.Distribution]:
    """Return the installed distributions that treadle needs with ``extras``, itself included, by
    normalised name.

    Raises TreadleError for one that is not installed.
    """
    from packaging.requirements import Requirement

    todo = [("treadle", extras)]
    seen: dict[str, frozenset[str]] = {}  # extras by name
    found: dict[str, installed.Distribution] = {}
    while todo:
        name, wanted = todo.pop()
        known = seen.get(name)
        if known is not None and wanted <= known:
            continue
        seen[name] = wanted | (known or frozenset())
        try:
            found[name] = installed.distribution(name)
        except installed.PackageNotFoundError:
            raise TreadleError(f"{name} is not installed here: pip install {name}") from None
        for text in found[name].requires or []:
            need = Requirement(text)
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in {"", *seen[name]}
            ):
                todo.append((plain(need.name), frozenset(need.extras)))
    return found


def write_wheel(path: Path, info: str, files: Iterable[tuple[str, bytes]], level: int = 1) -> None:
    """Write the wheel ``path`` from ``files``, (name, content) pairs; ``info`` is the name of its
    .dist-info folder. ``level``: zlib's compression; 6 makes it a tenth smaller and takes five
    times as long.
    """
    record = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, level)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")


def own_wheel(to: Path) -> Path:
    """Write a wheel of the running treadle into the folder ``to``, and return its path."""
    own = installed.distribution("treadle")
    base = f"treadle-{treadle.__version__}"
    info = f"{base}.dist-info"
    meta = re.sub(
        r"^Version: .*$",
        f"Version: {treadle.__version__}",
        own.read_text("METADATA") or "",
        count=1,
        flags=re.MULTILINE,
    )

    def files() -> Iterator[tuple[str, bytes]]:
        root = Path(treadle.__file__).resolve().parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"treadle/{path.relative_to(root).as_posix()}", path.read_bytes()
        yield f"{info}/METADATA", meta.encode()
        yield f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

    path = to / f"{base}-py3-none-any.whl"
    write_wheel(path, info, files())
    return path


def installed_wheel(of: installed.Distribution, to: Path) -> Path:
    """Write a wheel of the installed distribution ``of`` into the folder ``to``, and return its
    path.

    Raises TreadleError for one without a list of its files, or with missing files.
    """
    name = of.metadata["Name"]
    about = of.read_text("WHEEL")
    tags = re.findall(r"^Tag: *(\S+)-(\S+)-(\S+) *$", about or "", re.MULTILINE)
    if not tags or not of.files:
        raise TreadleError(f"{name} was not installed as a wheel: pip install --force {name}")
    base = f"{re.sub(r'[-_.]+', '_', name)}-{of.version}"
    joined = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    (info,) = {str(f.parent) for f in of.files if f.name == "WHEEL" and len(f.parts) == 2}

    def files() -> Iterator[tuple[str, bytes]]:
        for file in of.files or ():
            ours = file.parts[0] != ".." and "__pycache__" not in file.parts  # no scripts
            if ours and not (str(file.parent) == info and file.name in LEFT_OUT):
                yield file.as_posix(), Path(str(file.locate())).read_bytes()

    path = to / f"{base}-{joined}.whl"
    try:
        write_wheel(path, info, files())
    except FileNotFoundError as error:
        raise TreadleError(f"{name} is incomplete: {error.filename} is missing") from error
    return path


@dataclass(frozen=True)
class Target:
    """A CPU architecture (``machine``, as "x86_64") and a Python version (as (3, 12)) that a bundle
    runs on; always with Linux, glibc and CPython.
    """

    machine: str
    python: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.machine} CPython {self.python[0]}.{self.python[1]}"

    def complete(self) -> str:
        """Return pex's description of the platform, its markers and wheel tags, as JSON."""
        from packaging.tags import compatible_tags, cpython_tags

        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in GLIBC]
        # The old names: for glibc 2.17, and for no particular glibc.
        platforms += [f"manylinux2014_{self.machine}", f"linux_{self.machine}"]
        version = "{}.{}".format(*self.python)
        cp = "cp{}{}".format(*self.python)
        tags = [*cpython_tags(self.python, platforms=platforms)]
        tags += compatible_tags(self.python, cp, platforms)
        marker = {
            "implementation_name": "cpython",
            "implementation_version": f"{version}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{version}.0",
            "python_version": version,
            "sys_platform": "linux",
        }
        return json.dumps({"marker_environment": marker, "compatible_tags": [*map(str, tags)]})


def requirement(name: str) -> str:
    """Return treadle's requirement for the package ``name``, as pip takes it ("llvmlite>=0.44")."""
    from packaging.requirements import Requirement

    asked = (Requirement(text) for text in installed.distribution("treadle").requires or [])
    (found,) = {f"{need.name}{need.specifier}" for need in asked if plain(need.name) == name}
    return found


def any_python(path: Path) -> Path:
    """Replace the wheel ``path`` by one tagged for any Python 3, and return its path.

    Raises TreadleError for one with Python extension modules.
    """
    project, version, *_, platforms = path.stem.split("-")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        info = about.rpartition("/")[0]
        extensions = [name for name in names if re.search(r"\.(cpython-|cp3\d+-|abi3\.)", name)]
        if extensions:
            raise TreadleError(
                f"{path.name} is for one Python version only: {listed(extensions, 1)}"
            )
        tags = "".join(f"Tag: py3-none-{one}\n" for one in platforms.split("."))
        told = {about: f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tags}".encode()}
        result = path.with_name(f"{project}-{version}-py3-none-{platforms}.whl")
        kept = (name for name in names if name != f"{info}/RECORD")
        write_wheel(
            result, info, ((name, told.get(name) or archive.read(name)) for name in kept), 6
        )
    path.unlink()
    return result


def this_target() -> Target:
    """Return this machine's architecture and Python."""
    return Target(machine(), sys.version_info[:2])
