"""Digests of logits, to show that a change to treadle changes no bit of what it computes.

    python tools/logits_digest.py --out before.json
    python tools/logits_digest.py --out after.json --compare before.json

One case is one array of float32: a model, an instruction set, a type of keys and values, a number
of threads, and what is run. The file has one line for each case: its name, the first 16 hexadecimal
digits of the SHA-256 of its bytes, its largest magnitude, and eight of its values. By these values
a comparison says how far apart two arrays are. Nearly all the time of a run is for kernels that the
cache (TREADLE_CACHE) does not have yet.

The exit status is 1 if a digest differs from the old one, is missing, or depends on the number of
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from digest_models import Subject, subjects  # noqa: E402

import treadle  # noqa: E402
from tests.kernels.rows import ALL, MADE_UP  # noqa: E402
from treadle.errors import TreadleError  # noqa: E402
from treadle.isa import ROWS  # noqa: E402

N_DECODED = 8
N_SEQUENCES = 8
N_SAMPLES = 8  # values of an array that the file has
TEXT = "Once upon a time there was a little model. It was seven years old, and it had no name."
KV_SUBJECTS = ("babyllama105/babyllama105-Q8_0", "random/gemma3", "random/qwen3")
KV_TYPES = ("bf16", "f32", "q8_0")
QUICK = (
    "stories260K",
    "babyllama105_pad256/mixed_Q4_K_M",
    "random/gemma3",
    "format/Q4_0",
    "format/MLX4_G64",
)
QUICK_OTHER_ROW = "format/Q4_0"  # run on one more row

Model = Any
Wanted = Callable[[str], bool]
Entry = tuple[str, float, list[float]]  # digest, largest magnitude, samples
Cases = dict[str, Callable[[Model], np.ndarray]]


def log(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# -- what is run ------------------------------------------------------------------------------


def ids(model: Model, seed: int, n: int) -> list[int]:
    """``n`` pseudo-random tokens; fewer where the context has no room for them and for decoding."""
    n = min(n, model.n_ctx - 2 * N_DECODED)
    n_vocab = model.config.n_vocab
    return [int(i) for i in np.random.default_rng(seed).integers(0, n_vocab, n)]


def read_and_decode(model: Model, n: int) -> np.ndarray:
    """A prompt of ``n`` tokens, and eight steps behind it: float32 [1 + 8, n_vocab]."""
    session = model.session()
    try:
        rows = [session.feed(ids(model, n, n))]
        rows += [session.feed([token]) for token in ids(model, n + 1, N_DECODED)]
        return np.stack(rows)
    finally:
        session.close()


def every_token(model: Model) -> np.ndarray:
    """Logits after each token: float32 [n_tokens, n_vocab]."""
    return model.logits(ids(model, 2, 150))


def small_pieces(model: Model) -> np.ndarray:
    """A text read 1 to 9 tokens at a time: float32 [9, n_vocab]."""
    session = model.session()
    try:
        return np.stack([session.feed(ids(model, 100 + n, n)) for n in range(1, 10)])
    finally:
        session.close()


def embedding(model: Model) -> np.ndarray:
    """States of a short text and of a longer one: float32 [2, n_embd]."""
    return model.embed([TEXT[:23], TEXT])


def mixed_batches(model: Model) -> np.ndarray:
    """Prompts of three sequences at once; their next tokens beside a fourth's prompt; then 6, 4
    and 2 sequences that decode. The one place that calls the engine: float32 [outputs, n_vocab].
    """
    from treadle.engine.batch import BatchItem

    sessions = [model.session() for _ in range(6)]
    seqs = [session.seq for session in sessions]

    def run(*parts: tuple[int, int, int]) -> np.ndarray:
        return model.engine.run(
            [BatchItem(seqs[i], ids(model, 7 * i + n, n), n_outputs) for i, n, n_outputs in parts]
        )

    try:
        rows = [
            run((0, 5, 1), (1, 40, 3), (2, 17, 0)),
            run((0, 1, 1), (1, 1, 1), (3, 33, 2), (2, 1, 1), (4, 2, 1), (5, 3, 1)),
            *(run(*((i, 1, 1) for i in range(n))) for n in (6, 4, 2)),
        ]
        return np.concatenate(rows)
    finally:
        for session in sessions:
            session.close()


def prompts(*lengths: int) -> Cases:
    """``read_and_decode`` of each length."""
    return {f"prompt {n}": partial(read_and_decode, n=n) for n in lengths}


# Compiling takes nearly all the time of a run, so what needs more kernels is run on few rows.
BASIC = prompts(1, 7, 33, 300)
BATCHES: Cases = {"batches": mixed_batches}
EVERY = {
    **BASIC,
    "every token": every_token,
    "small pieces": small_pieces,
    **BATCHES,
    "embed": embedding,
}
LONG = prompts(1100)  # a decoding step's history is then cut into several parts


# -- which cases there are --------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a model is loaded, and what is run."""

    subject: str
    isa: str
    what: Cases
    kv: str = "f16"
    threads: int = 2
    deterministic: bool = False

    @property
    def name(self) -> str:
        det = " deterministic" if self.deterministic else ""
        return f"{self.subject} {self.isa} {self.kv} {self.threads}t{det}"

    def cases(self, wanted: Wanted) -> Cases:
        """Those of its cases that are wanted, by their full names."""
        named = {f"{self.name}: {case}": function for case, function in self.what.items()}
        return {name: function for name, function in named.items() if wanted(name)}


def rows() -> list[str]:
    """The instruction sets of this machine, the best first, and at the end that whose matrix
    registers are made of memory.
    """
    ROWS.setdefault(MADE_UP.name, MADE_UP)
    return [*(row.name for row in reversed(ALL)), MADE_UP.name]


def quick_settings(subject: Subject) -> Iterator[Setting]:
    """A small part of ``settings``."""
    name = subject.name
    (best, *others) = rows()
    if name in QUICK:
        yield Setting(name, best, BASIC | (LONG if subject.random else {}))
    if name == QUICK_OTHER_ROW:
        yield Setting(name, "avx2" if "avx2" in others else "portable", BASIC)


def settings(subject: Subject) -> Iterator[Setting]:
    """How a subject is run; the best row has more."""
    name = subject.name
    (best, *others) = rows()
    yield Setting(name, best, EVERY | (LONG if subject.random else {}))
    yield Setting(name, best, EVERY, threads=1)
    yield Setting(name, best, BASIC | BATCHES, deterministic=True)
    if name not in KV_SUBJECTS:
        for row in others:
            yield Setting(name, row, BASIC)
        return
    for row in others:
        yield Setting(name, row, EVERY | LONG)
        yield Setting(name, row, BASIC | BATCHES, deterministic=True)
    for row in (best, *others):
        for kv in KV_TYPES:
            yield Setting(name, row, BASIC | BATCHES | LONG, kv)


# -- running them -----------------------------------------------------------------------------


def digest(array: np.ndarray) -> Entry:
    """Return the file's entry of an array."""
    array = np.ascontiguousarray(array)
    if array.dtype != np.float32:
        raise TypeError(f"logits are {array.dtype}")
    flat = array.ravel()
    at = np.linspace(0, flat.size - 1, N_SAMPLES).astype(int)
    samples = [float(f"{x:.8g}") for x in flat[at]]
    return sha256(array.tobytes()).hexdigest()[:16], float(f"{np.abs(flat).max():.8g}"), samples


def run_setting(setting: Setting, path: Path, cases: Cases) -> dict[str, Entry]:
    """Digests by name. Raises TreadleError where the model is refused."""
    model = treadle.load(
        path,
        isa=setting.isa,
        kv=setting.kv,
        threads=setting.threads,
        deterministic=setting.deterministic,
        n_sequences=N_SEQUENCES,
    )
    found: dict[str, Entry] = {}
    with model:
        for name, case in cases.items():
            try:
                found[name] = digest(case(model))
            except TreadleError as error:  # such as embed() without a vocabulary
                found[name] = type(error).__name__, 0.0, []
    return found


def file_digest(path: Path) -> Entry:
    """A random model's own bytes: where these differ, so will the logits."""
    whole = sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:
        whole.update(part.read_bytes())
    return whole.hexdigest()[:16], 0.0, []


def machine() -> dict[str, Any]:
    """Where and with what the digests were made; ``src``: its last commit, + with changes."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if "model name" in line), cpu)
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "log", "-1", "--format=%h", "--", "src"], capture_output=True)
    changes = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True)
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": cpu,
        "rows": rows(),
        "src": commit.stdout.decode().strip() + ("+" if changes.stdout else ""),
        "numpy": np.__version__,
    }


class Selection:
    """The settings and cases that were asked for."""

    def __init__(self, data: Path, quick: bool, only: list[str] | None) -> None:
        self.quick = quick
        self.only = only
        self.subjects = {subject.name: subject for subject in subjects(data)}

    def wanted(self, name: str) -> bool:
        return not self.only or any(fnmatch(name, f"*{pattern}*") for pattern in self.only)

    def cases(self, subject: Subject) -> list[tuple[Setting, Cases]]:
        made = quick_settings(subject) if self.quick else settings(subject)
        return [(setting, cases) for setting in made if (cases := setting.cases(self.wanted))]

    def names(self) -> set[str]:
        """Of all cases."""
        found = (self.cases(subject) for subject in self.subjects.values())
        return {name for settings in found for _, cases in settings for name in cases}

    def run(self, name: str) -> tuple[dict[str, Entry], str]:
        """A subject's digests by name, and why it was refused, empty where it was not."""
        subject = self.subjects[name]
        found = dict[str, Entry]()
        if not (todo := self.cases(subject)):
            return {}, ""
        folder = Path(tempfile.mkdtemp(prefix="treadle-digest-"))
        try:
            path = subject.make(folder)
            for setting, cases in todo:
                began = time.monotonic()
                found |= run_setting(setting, path, cases)
                log(f"{time.monotonic() - began:5.0f} s  {setting.name}: {len(cases)} cases")
            if subject.random:
                found[f"{name}: file"] = file_digest(path)
        except TreadleError as error:
            log(f"         {name} is refused: {type(error).__name__}")
            return found, type(error).__name__
        finally:
            shutil.rmtree(folder)
        return found, ""


def run_all(selection: Selection, out: Path, jobs: int) -> dict[str, Any]:
    """The contents of the file; written anew after every model, so that a stop loses little."""
    began = time.monotonic()
    cases: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    result = {**machine(), "seconds": 0.0, "refused": refused, "cases": cases}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        done = (pool.map if jobs > 1 else map)(selection.run, selection.subjects)
        for name, (found, refusal) in zip(selection.subjects, done, strict=True):
            if refusal:
                refused[name] = refusal
            cases |= found
            result["seconds"] = round(time.monotonic() - began, 1)
            write(result, out)
    return result


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON, a line for each case."""
    head = json.dumps({k: v for k, v in result.items() if k != "cases"}, indent=1)
    lines = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in result["cases"].items()]
    text = head.removesuffix("\n}") + ',\n "cases": {\n' + ",\n".join(lines) + "\n }\n}\n"
    made = path.with_name(f"{path.name}.part")
    made.write_text(text, "utf-8")
    os.replace(made, path)


# -- comparing --------------------------------------------------------------------------------


def distance(a: Entry, b: Entry) -> str:
    """How far apart two arrays are, by the values that the file has of them."""
    if not a[2] or not b[2]:
        return f"{a[0]}, was {b[0]}"
    apart = float(np.abs(np.subtract(a[2], b[2])).max())
    return f"at most {apart:.2g} apart in {len(a[2])} samples, largest magnitude {b[1]:.6g}"


def changed(new: dict[str, Entry], old: dict[str, Entry], asked: set[str]) -> list[str]:
    """Return a line for each difference; ``asked``: the names that were to be run."""
    lines = [
        f"differs: {name}: {distance(case, old[name])}"
        for name, case in new.items()
        if name in old and case[0] != old[name][0]
    ]
    return lines + [f"is gone: {name}" for name in old if name in asked and name not in new]


def by_threads(cases: dict[str, Entry]) -> list[str]:
    """Cases whose digest depends on the number of threads."""
    pairs = [(name, name.replace(" 1t", " 2t")) for name in cases if " 1t" in name]
    return [
        f"depends on threads: {two}: {distance(cases[one], cases[two])}"
        for one, two in pairs
        if two in cases and cases[one][0] != cases[two][0]
    ]


def report(result: dict[str, Any], selection: Selection, compare: Path | None) -> int:
    """Print what differs; the exit status."""
    lines = by_threads(result["cases"])
    if compare is not None:
        old = json.loads(compare.read_text("utf-8"))
        lines += changed(result["cases"], old["cases"], selection.names())
        n_both = len(result["cases"].keys() & old["cases"].keys())
        print(f"{n_both} cases compared with {compare}, src of {old['src']} on {old['cpu']}")
    print("\n".join([*lines, f"{len(result['cases'])} cases, {len(lines)} complaints"]))
    return int(bool(lines))


def main(argv: list[str] | None = None) -> int:
    """Run, write, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--compare", type=Path, metavar="OLD.json")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="names to run, such as 'format/Q4* amx*'"
    )
    parser.add_argument("--quick", action="store_true", help="a small part, most on the best row")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    args = parser.parse_args(argv)
    os.environ["TREADLE_TUNE"] = "0"  # a tuned row chooses other kernels
    selection = Selection(args.data, args.quick, args.only)
    return report(run_all(selection, args.out, args.jobs), selection, args.compare)


if __name__ == "__main__":
    sys.exit(main())
