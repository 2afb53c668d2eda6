"""KL divergence and perplexity of real models in several mixes, by treadle's quantiser and ggml's.

    python tools/quantize_quality.py MODEL.gguf ... --results FILE.json [--ggml PYTHON] [--mix Q4_0]

Each model is written as F32 first. The importance matrix is made of one text, the measurement of
another: halves of Python's own documentation and standard library. treadle measures all files.
``--ggml`` is a Python that has llama-cpp-python, whose quantiser gets the same matrix.

Results are kept in FILE.json, and what is there is not measured again: a run may be stopped and
started anew, and ``--mix`` and ``--model`` may name a part. Prints a table for docs/formats.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

MIXES = ("Q4_0", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "IQ3_S", "Q5_K_M", "Q6_K")
ENGINES = ("treadle", "ggml")
PIECE = 1500  # characters of prose, then as many of code
EVALUATION = ("textwrap", "heapq", "shlex", "bisect", "fnmatch", "sched")
CALIBRATION = ("argparse", "configparser", "csv", "difflib", "gettext", "mailbox", "zipfile")
WINDOWS = 12  # of 512 tokens, of each of which the second half is scored
CALIBRATION_WINDOWS = 48

# Run by the Python that has llama-cpp-python: source, target, mix, importances or nothing.
GGML = """
import ctypes, json, sys
import numpy as np
import llama_cpp
source, target, file_type, importances, threads = sys.argv[1:]
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(file_type), int(threads)
keep = []
if importances:
    entries = np.load(importances)
    kind = llama_cpp.llama_cpp.llama_model_imatrix_data
    array = (kind * (len(entries.files) + 1))()
    for row, name in zip(array, entries.files):
        data = np.ascontiguousarray(entries[name], np.float32)
        keep.append(data)
        row.name, row.size = name.encode(), data.size
        row.data = data.ctypes.data_as(type(row.data))
    params.imatrix = array
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
"""


def pieces(text: str) -> list[str]:
    """Parts of about PIECE characters that end with a line."""
    made = []
    part = ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= PIECE:
            made.append(part)
            part = ""
    return made


def text_of(modules: tuple[str, ...], parity: int) -> str:
    """Prose and code in turns: every second topic of Python's documentation, and these modules."""
    prose = "\n".join(topics[name] for i, name in enumerate(sorted(topics)) if i % 2 == parity)
    code = ""
    for name in modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        code += Path(spec.origin).read_text("utf-8")
    both = zip_longest(pieces(prose), pieces(code), fillvalue="")
    return "\n".join(chain.from_iterable(both))


def treadle(*arguments: object) -> Any:
    """Return the value that a command prints with ``--json``."""
    command = [sys.executable, "-m", "treadle", *map(str, arguments), "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout)


@dataclass(frozen=True)
class Bench:
    """One model, and the files made of it."""

    source: Path
    folder: Path
    ggml: str
    windows: int
    threads: int

    @property
    def name(self) -> str:
        return self.source.stem

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def prepare(self) -> None:
        """The model in F32, the importance matrix, and F32's predictions."""
        exact = self.file("F32.gguf")
        matrix = self.file("imatrix")
        logits = self.file("logits")
        if not exact.exists():
            treadle("quantize", self.source, exact, "F32", "--allow-requantize")
        text = self.folder / "calibration.txt"
        text.write_text(text_of(CALIBRATION, 1), "utf-8")
        if not matrix.exists():
            treadle("imatrix", exact, text, "-o", matrix, "--chunks", CALIBRATION_WINDOWS)
        text = self.folder / "evaluation.txt"
        text.write_text(text_of(EVALUATION, 0), "utf-8")
        if not logits.exists():
            treadle("perplexity", exact, text, "--save-logits", logits, "--chunks", self.windows)

    def measure(self, mix: str, engine: str, aware: bool) -> dict[str, float]:
        """Quantise, and compare with F32."""
        target = self.file(f"{mix}.gguf")
        target.unlink(missing_ok=True)
        make = self.by_treadle if engine == "treadle" else self.by_ggml
        make(mix, target, aware)
        logits = self.file("logits")
        found = treadle("perplexity", target, "--kl-from", logits, "--chunks", self.windows)
        n_bytes = target.stat().st_size
        target.unlink()
        return {
            "kl": found["kl"]["value"],
            "kl_error": found["kl"]["error"],
            "perplexity": found["perplexity"]["value"],
            "base_perplexity": found["base_perplexity"]["value"],
            "n_bytes": n_bytes,
        }

    def by_treadle(self, mix: str, target: Path, aware: bool) -> None:
        more = ["--imatrix", self.file("imatrix")] if aware else []
        treadle("quantize", self.file("F32.gguf"), target, mix, *more, "-t", self.threads)

    def by_ggml(self, mix: str, target: Path, aware: bool) -> None:
        import numpy as np

        from treadle.quantize.imatrix.matrix import read
        from treadle.quantize.plan import find_mix

        importances = ""
        if aware:
            importances = str(self.file("imatrix.npz"))
            entries = read(self.file("imatrix")).entries
            np.savez(importances, **{name: e.weights() for name, e in entries.items()})  # type: ignore[arg-type]
        file_type = find_mix(mix).file_type
        command = [self.ggml, "-c", GGML, self.file("F32.gguf"), target, file_type, importances]
        made = subprocess.run(
            [*map(str, command), str(self.threads)], capture_output=True, check=False
        )
        if made.returncode:
            raise SystemExit(made.stderr.decode()[-2000:])


def table(results: dict[str, Any], mixes: list[str]) -> Iterator[str]:
    """For docs/formats.md."""
    kinds = ("", ", ggml", ", matrix", ", matrix, ggml")
    columns = [f"{what}{kind}" for what in ("KL", "perplexity") for kind in kinds]
    yield f"| model | mix | MB | {' | '.join(columns)} |"
    yield "|---|---|---:|" + "---:|" * len(columns)
    for model, rows in results.items():
        for mix in mixes:
            cells: list[str] = []
            for field, form in (("kl", ".4f"), ("perplexity", ".2f")):
                for aware in (False, True):
                    for engine in ENGINES:
                        row = rows.get(key_of(mix, engine, aware))
                        cells.append(format(row[field], form) if row else "")
            size = rows.get(key_of(mix, "treadle", False))
            n_bytes = f"{size['n_bytes'] / 1e6:.0f}" if size else ""
            if any(cells):
                yield f"| {model} | {mix} | {n_bytes} | {' | '.join(cells)} |"


def key_of(mix: str, engine: str, aware: bool) -> str:
    return f"{mix} {engine}{' matrix' if aware else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--results", type=Path, required=True, help="JSON, kept between runs")
    parser.add_argument("--folder", type=Path, default=Path("quality"), help="for large files")
    parser.add_argument("--ggml", metavar="PYTHON", default="", help="has llama-cpp-python")
    parser.add_argument("--mix", action="append", help=f"may be repeated [{' '.join(MIXES)}]")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("-t", "--threads", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    if given.results.exists():
        results = json.loads(given.results.read_text())
    for path in given.models:
        bench = Bench(path, given.folder, given.ggml, given.windows, given.threads)
        rows = results.setdefault(bench.name, {})
        bench.prepare()
        for mix in given.mix or MIXES:
            for engine in given.engine or (ENGINES if given.ggml else ENGINES[:1]):
                for aware in (False, True):
                    key = key_of(mix, engine, aware)
                    if key in rows and not given.again:
                        continue
                    rows[key] = bench.measure(mix, engine, aware)
                    given.results.write_text(json.dumps(results, indent=1))
                    print(f"{bench.name} {key}: {rows[key]}", file=sys.stderr, flush=True)
    print("\n".join(table(results, list(given.mix or MIXES))))


if __name__ == "__main__":
    main()
