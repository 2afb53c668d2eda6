"""Time to open a file with a large vocabulary: 262,144 pieces and 500,000 merges, most of
them never looked at.

python bench/open.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from treadle.files.gguf import GGUFWriter, open_gguf

PIECES = 262_144
MERGES = 500_000


def main() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 16, PIECES)
    words = ["".join(map(chr, rng.integers(97, 123, n))) for n in lengths]
    merges = [f"{words[a]} {words[b]}" for a, b in rng.integers(0, PIECES, (MERGES, 2))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = GGUFWriter(path)
        writer.add("general.architecture", "llama")
        writer.add("tokenizer.ggml.tokens", words)
        writer.add("tokenizer.ggml.merges", merges)
        writer.write()
        times = []
        for _ in range(21):
            began = time.perf_counter()
            file = open_gguf(path)
            times.append((time.perf_counter() - began) * 1e3)
            assert len(file.metadata["tokenizer.ggml.merges"]) == MERGES
            file.close()
    print(
        f"{PIECES} pieces and {MERGES} merges: median {statistics.median(times):.1f} ms, "
        f"min {min(times):.1f}, max {max(times):.1f}"
    )


if __name__ == "__main__":
    main()
