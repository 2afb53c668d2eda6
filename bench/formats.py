"""One table of all weight formats: bits, sizes, what they cost in quality, and their speed here.

    python bench/formats.py [--data ../shared/data] [--layers 8] [--formats Q4_K,Q6_K] [--json FILE]

Quality is the KL divergence, in nats, of a quantised model's predictions from those of the model
itself: the packaged model (from the Q8_0 it ships in) on a file of the standard library, and,
where the folder of test data is there, babyllama on a story of its own. Speed is that of random
weights in TinyLlama's shape with fewer layers, at the threads that treadle chooses: reading 512
tokens, as operations a second in shares of what dots of bytes in vectors reach here at most (on
matrix registers that can be more than all of it), of plain floats in shares of the peak that bounds
them; and writing as a share of the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from random_model import SHAPES, write

import treadle
from treadle.errors import TreadleError
from treadle.formats import FORMATS, Format

WEIGHTS_OF_8B = 8.03e9  # Llama 3.1 8B
DEMO = Path(treadle.__file__).parent / "data" / "demo.gguf"
BABYLLAMA = "models/babyllama105_pad256/F32.gguf"


def run(*args: str | Path) -> str:
    """Return the output of a treadle command. Raises TreadleError with its last line of errors."""
    command = [sys.executable, "-m", "treadle", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TreadleError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def quality(model: Path, text: Path, fmt: Format, folder: Path) -> float | None:
    """KL divergence of ``model`` in ``fmt`` from itself; None where the format cannot hold it."""
    made = folder / "quantised.gguf"
    try:
        run("quantize", model, made, fmt.name, "--pure", "--allow-requantize", "--force")
        measured = json.loads(run("perplexity", made, text, "--kl-from", model, "--json"))
    except TreadleError as error:
        print(f"{fmt.name}: {error}", file=sys.stderr)
        return None
    return float(measured["kl"]["value"])


def speeds(fmt: Format, layers: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lines of ``treadle bench`` for reading and for writing."""
    path = folder / f"random-{fmt.name}.gguf"
    write(replace(SHAPES["tinyllama"], n_layer=layers, n_vocab=8192), fmt, str(path))
    try:
        read, written = json.loads(run("bench", path, "-p", "512", "-n", "16", "-r", "2", "--json"))
    finally:
        path.unlink()
    return read, written


def percent(line: dict[str, Any]) -> str:
    """The share of the peak that bounds it."""
    share = line["share_of_peak"]
    return "" if share is None else f"{100 * share:.0f} %"


def of_int8(line: dict[str, Any]) -> str:
    """Operations a second as a share of the peak of vectors of bytes."""
    return f"{100 * line['ops_s'] / line['peaks']['int8']:.0f} %"


def main() -> None:
    """Measure and print, a format at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--formats", default=",".join(f.name for f in FORMATS.values()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    head = ("format", "bits", "block", "8B, GB", "KL demo", "KL babyllama")
    head += ("pp512", "of int8", "tg", "of bandwidth")
    print(f"| {' | '.join(head)} |", "|---|" + "---:|" * 9, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = Path(textwrap.__file__)
        story = folder / "story.txt"
        baby = args.data / BABYLLAMA
        if baby.exists():
            options = ("-n", "3000", "-c", "4096", "--temp", "1", "--seed", "1")
            story.write_text(run("run", baby, "Once upon a time", *options), "utf-8")
        for fmt in FORMATS.values():
            if fmt.name not in args.formats.split(","):
                continue
            bits = 8 * fmt.dtype.itemsize / fmt.block
            demo = quality(DEMO, code, fmt, folder)
            told = quality(baby, story, fmt, folder) if baby.exists() else None
            read, written = speeds(fmt, args.layers, folder)
            rows.append(
                {
                    "format": fmt.name,
                    "bits": bits,
                    "demo": demo,
                    "babyllama": told,
                    "pp": read,
                    "tg": written,
                }
            )
            cells = [fmt.name, f"{bits:.4g}", fmt.block, f"{bits * WEIGHTS_OF_8B / 8e9:.2f}"]
            cells += ["" if kl is None else f"{kl:.2g}" for kl in (demo, told)]
            share = of_int8(read) if fmt.codes else percent(read)
            cells += [f"{read['tok_s']:.0f}", share, f"{written['tok_s']:.1f}"]
            print("|", " | ".join(map(str, [*cells, percent(written)])), "|", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), "utf-8")


if __name__ == "__main__":
    main()
