"""Fetch qemu-user, which runs the tests of other machines' kernels, from Debian's registry.

Into ``.emulators`` of the checkout, or the folder that ``TREADLE_EMULATORS`` names: 30 MB, of a
download of 71 MB. apt does it with a state of its own, so neither root rights nor changes to this
system are needed; Debian's archive keys must be there (package debian-archive-keyring).

With ``--roots`` also Python and what treadle needs for each of those machines, 0.7 GB, for tests
that run whole models there. With ``--mca`` also LLVM's llvm-mca, 0.3 GB with all that it needs: it
estimates cycles of RISC-V cores for ``python -m bench.kernel_study --emulator qemu``.

    python tools/fetch_emulators.py [--roots] [--mca]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
SUITE = "trixie"  # qemu 10: knows Zvfh at every VLEN, i8mm and bf16
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PROGRAMS = ("qemu-aarch64", "qemu-riscv64")
WHEELS = [f"manylinux_{version}_aarch64" for version in ("2_28", "2_27", "2_17")]


@dataclass(frozen=True)
class Root:
    """Debian's ``packages`` for an architecture; ``python``: the version whose wheels PyPI has for
    it, empty where Debian itself must give every package.
    """

    architecture: str
    suite: str
    packages: tuple[str, ...]
    python: str = ""


ROOTS = {
    "aarch64": Root("arm64", "trixie", ("python3", "libstdc++6", "zlib1g"), "3.13"),
    # PyPI has no wheels of numpy or llvmlite for it, stable Debian none of the rest.
    "riscv64": Root(
        "riscv64",
        "sid",
        tuple(
            f"python3{name}"
            for name in (
                *("", "-numpy", "-llvmlite", "-sentencepiece", "-tokenizers", "-jinja2"),
                *("-click", "-rich", "-prompt-toolkit", "-huggingface-hub"),
            )
        ),
    ),
}
MCA = ("llvm-22",)  # the first with a model of SpacemiT's X60 that calls itself one
ROOT = Path(__file__).resolve().parent.parent


def apt(state: Path, architecture: str, suite: str, *command: str, folder: Path) -> None:
    """Run an apt command that knows only ``suite`` for ``architecture``; ``state``: a folder for
    what it remembers. Raises CalledProcessError.
    """
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYS}] {MIRROR} {suite} main\n")
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/nonexistent",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    subprocess.run([*command, "-qq", *options], cwd=folder, check=True, stdout=sys.stderr)


def architecture_here() -> str:
    """Debian's name of this machine's. Raises CalledProcessError."""
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def fetch(to: Path) -> None:
    """Put the emulators into ``to/bin``. Raises CalledProcessError where apt cannot."""
    bin_ = to / "bin"
    bin_.mkdir(parents=True, exist_ok=True)
    architecture = architecture_here()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = folder / "apt"
        apt(state, architecture, SUITE, "apt-get", "update", folder=folder)
        apt(state, architecture, SUITE, "apt-get", "download", "qemu-user", folder=folder)
        (package,) = folder.glob("qemu-user_*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "root"], cwd=folder, check=True)
        for program in PROGRAMS:
            put(bin_ / program, (folder / "root/usr/bin" / program).read_bytes())


def put(program: Path, content: bytes) -> None:
    """Into place at once: a test that runs beside this finds all of it or nothing."""
    new = program.with_name(f".{program.name}")
    new.write_bytes(content)
    new.chmod(0o755)
    new.replace(program)


def fetch_mca(to: Path) -> None:
    """Put llvm-mca into ``to/bin``: it runs with the libraries that it was built for, not this
    system's. Raises CalledProcessError where apt cannot.
    """
    root = to / "llvm"
    if not root.is_dir():
        fetch_root(Root(architecture_here(), "sid", MCA), root)
    (loader,) = (root / "usr").glob("lib*/ld-linux*.so.?")
    (program,) = (root / "usr/lib").glob("llvm-*/bin/llvm-mca")
    libraries = ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu")))
    line = f'exec "{loader}" --library-path "{libraries}" "{program}" "$@"'
    put(to / "bin/llvm-mca", f"#!/bin/sh\n{line}\n".encode())


def fetch_root(root: Root, to: Path) -> None:
    """Put a system of another architecture into ``to``: to be read by an emulator, never entered.

    Raises CalledProcessError where apt or pip cannot.
    """
    with tempfile.TemporaryDirectory(dir=to.parent) as name:
        folder = Path(name)
        state = folder / "apt"
        made = folder / "root"
        apt(state, root.architecture, root.suite, "apt-get", "update", folder=folder)
        install = ("apt-get", "install", "-y", "--download-only", "--no-install-recommends")
        apt(state, root.architecture, root.suite, *install, *root.packages, folder=folder)
        # One tree since 2016; packages say either.
        for folder_name in ("bin", "sbin", "lib", "lib64"):
            (made / "usr" / folder_name).mkdir(parents=True, exist_ok=True)
            (made / folder_name).symlink_to(f"usr/{folder_name}")
        for package in sorted((state / "archives").glob("*.deb")):
            unpack = f"dpkg-deb --fsys-tarfile '{package}' | tar -x --keep-directory-symlink"
            subprocess.run(["bash", "-o", "pipefail", "-c", unpack], cwd=made, check=True)
        site = made / "site"
        site.mkdir()
        if root.python:
            wheels(root.python, site)
        made.rename(to)


def wheels(python: str, to: Path) -> None:
    """Unpack the wheels of all that treadle depends on. Raises CalledProcessError."""
    import tomllib  # of Python 3.11: without --roots 3.10 does

    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    with tempfile.TemporaryDirectory() as name:
        machine = [word for platform in WHEELS for word in ("--platform", platform)]
        options = ["--only-binary=:all:", "--python-version", python, *machine, "--dest", name]
        download = [sys.executable, "-m", "pip", "download", "--quiet", *options, *needs]
        subprocess.run(download, check=True, stdout=sys.stderr)
        for wheel in Path(name).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(to)


def main(options: list[str]) -> int:
    """Fetch what is not there yet; tell where it is."""
    to = Path(os.environ.get("TREADLE_EMULATORS", ROOT / ".emulators"))
    if not all((to / "bin" / program).is_file() for program in PROGRAMS):
        fetch(to)
    for name, root in ROOTS.items() if "--roots" in options else ():
        if not (to / name).is_dir():
            fetch_root(root, to / name)
    if "--mca" in options and not (to / "bin/llvm-mca").is_file():
        fetch_mca(to)
    print(to)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
