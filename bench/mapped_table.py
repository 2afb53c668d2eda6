"""A model whose table of n-grams is larger than its memory: what becomes resident.

    sudo python bench/mapped_table.py [--table-mib 2048] [--limit-mib 700] [--tokens 64] [--json]

A tiny model of ``qwen4exp`` has a table of zeros, a file with a hole, which takes no disk. It reads
texts of random tokens in a memory control group of Linux (v1 or v2), for which it takes a
superuser; without one there is no limit. A line for each text, and one before all: the distinct
rows of the table read so far, the file's bytes that are mapped into the process, and the table's
that are in the system's page cache. Each row read should cost one page, and no row more.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scarce import group

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests.tiny

from tests.tiny import HYPERS, write_model

TABLE = "per_layer_token_embd.weight"
N_HEADS = 4
N_TEXTS = 3


def write(path: Path, n_bytes: int) -> None:
    """Write the model; its table of about ``n_bytes`` is a hole at the end of the file."""
    from treadle.files.gguf import open_gguf
    from treadle.files.gguf_writer import GGUFWriter

    row = int(HYPERS["embedding_length_per_layer_input"])  # type: ignore[call-overload]
    n = n_bytes // (4 * row * N_HEADS)
    small = path.with_name("small.gguf")
    write_model(small, "qwen4exp")
    with open_gguf(small) as gguf:
        writer = GGUFWriter(path)
        changes = {"vocab_sizes": [n] * N_HEADS, "offsets": [n * i for i in range(N_HEADS)]}
        for key, value in gguf.metadata.items():
            writer.add(key, changes.get(key.rpartition("ple.head_")[2], value))
        tensors = [t for t in gguf.tensors.values() if t.name != TABLE]
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.shape, tensor.ggml_type, tensor.data)
        writer.add_tensor(TABLE, (n * N_HEADS, row), "F32", b"")
        layout = writer.layout()
        with path.open("wb") as file:
            file.write(layout.header)
            for tensor in tensors:
                file.seek(layout.offsets[tensor.name])
                file.write(np.ascontiguousarray(tensor.data).view(np.uint8).data)
            file.truncate(layout.n_bytes)
    small.unlink()


def cached_bytes(path: Path, begin: int) -> int:
    """Return the bytes of a file, of whole pages from ``begin`` on, that the system's page cache
    holds.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        array = np.frombuffer(memory, np.uint8)
        flags = np.zeros(-(-len(memory) // page), np.uint8)
        where = ctypes.c_void_p(array.ctypes.data)
        if libc.mincore(where, ctypes.c_size_t(len(memory)), ctypes.c_void_p(flags.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        del array
    return int((flags[-(-begin // page) :] & 1).sum()) * page


def rows_of(model: Any, ids: list[int]) -> set[int]:
    """Return the numbers of the table's rows that a text reads, by the kernels' twins."""
    from treadle.engine.batch import BatchItem

    with contextlib.closing(model.engine.cache.sequence()) as sequence:
        (layer,) = (i for i, at in enumerate(model.config.layers) if at.ngrams)
        label = f"L{layer}.ngrams.rows"
        plan, arena = model.engine.run_reference([BatchItem(sequence, ids, 1)], until=label)
    (step,) = plan.match(label)
    buffer = step.args["out"]
    at = plan.offsets[buffer]
    rows = arena[at : at + len(ids) * buffer.row_bytes].view(np.int64).reshape(len(ids), -1)
    return set(rows[:, :N_HEADS].reshape(-1).tolist())


def child(path: Path, n: int, folder: str) -> None:
    """Read texts, and print what was resident before them and behind each."""
    if folder:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    import treadle
    from treadle.devices.cpu.residence import mapped_bytes

    with treadle.load(path, threads=1, context=n, n_sequences=2) as model:
        table = model.gguf.tensors[TABLE]
        begin = path.stat().st_size - table.n_bytes
        rows: set[int] = set()
        lines = []
        for seed in range(N_TEXTS + 1):
            if seed:
                ids = np.random.default_rng(seed).integers(6, 300, n).tolist()
                assert np.isfinite(model.logits(ids)).all()
                rows |= rows_of(model, ids)
            line = {"rows": len(rows), "mapped": mapped_bytes([path])}
            lines.append(line | {"cached": cached_bytes(path, begin)})
    print(json.dumps(lines))


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """A control group with a limit of bytes; None where this user may make none."""
    try:
        folder = group(limit)
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def peak_bytes(folder: Path) -> int:
    """Return the most memory that a control group had."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (folder / name).exists():
            return int((folder / name).read_text())
    return 0


def measure(table: int, limit: int, n: int, where: Path) -> dict[str, Any]:
    """Return the table's bytes, the limit (0: none) and the most memory used, and a line for each
    text.
    """
    path = where / "table.gguf"
    write(path, table)
    with limited(limit) as folder:
        command = [sys.executable, __file__, "--tokens", str(n), "--child", str(path)]
        command.append(str(folder or ""))
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak = peak_bytes(folder) if folder else 0
    lines = json.loads(done.stdout.splitlines()[-1])
    disk = path.stat().st_blocks * 512
    path.unlink()
    limits = {"limit": limit if folder else 0, "peak": peak}
    return {"table": table, "disk": disk, **limits, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table-mib", type=int, default=2048)
    parser.add_argument("--limit-mib", type=int, default=700)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        path, folder = args.child
        return child(Path(path), args.tokens, folder)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        told = measure(args.table_mib << 20, args.limit_mib << 20, args.tokens, Path(made))
    if args.json:
        print(json.dumps(told))
        return None
    limit = f"a limit of {told['limit'] >> 20} MiB" if told["limit"] else "no limit"
    print(f"table {told['table'] >> 20} MiB, file on disk {told['disk'] >> 10} KiB, {limit}")
    for line in told["lines"]:
        mapped, cached = (f"{line[name] / 2**20:7.1f} MiB" for name in ("mapped", "cached"))
        print(f"{line['rows']:6} rows  mapped {mapped}  in the page cache {cached}")
    if told["limit"]:
        print(f"most memory of the group {told['peak'] / 2**20:.0f} MiB")
    return None


if __name__ == "__main__":
    main()
