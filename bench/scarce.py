"""A mixture of experts larger than the memory there is for it: what a token costs.

    sudo python bench/scarce.py [--limit-mib 450] [--layers 2] [--tokens 40]

A model of random weights in the shape of Qwen3-30B-A3B, cut to a few layers, is read in a memory
control group of Linux (v1 or v2), for which it takes a superuser. In turns: with experts asked for
as they are chosen, as treadle does, and without, as any mapped file is read; and with no limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experts import write

ROOT = Path("/sys/fs/cgroup")
KINDS = ("asked for", "as it comes", "no limit")


def group(limit: int) -> Path:
    """A new control group with a limit of bytes. Raises OSError where this user may make none."""
    v1 = (ROOT / "memory").is_dir()
    made = (ROOT / "memory" if v1 else ROOT) / f"treadle-bench-{os.getpid()}"
    made.mkdir()
    try:
        (made / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))
    except OSError:
        made.rmdir()
        raise
    return made


def child(path: Path, kind: str, n: int, folder: Path) -> None:
    """Read and write text, and tell what it took."""
    import treadle
    from treadle.devices.cpu.residence import read_bytes
    from treadle.system import SYSTEM

    if kind != "no limit":
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    if kind == "as it comes":
        SYSTEM.fetch_call = lambda: None  # type: ignore[method-assign]
    with path.open("rb") as file:
        SYSTEM.drop_pages(file.fileno(), 0, 0)
    with treadle.load(path, context=1024) as model:
        list(model.generate([1, 5, 9], max_tokens=2))  # plans and kernels are made
        marks = [(time.perf_counter(), read_bytes() or 0)]
        session = model.session()
        ids = [300 + 37 * i for i in range(256)]
        list(model.generate(ids, max_tokens=1, session=session))
        marks.append((time.perf_counter(), read_bytes() or 0))
        sampling = treadle.Sampling(temperature=1.0, seed=1)
        list(model.generate([7], max_tokens=n, sampling=sampling, session=session))
        marks.append((time.perf_counter(), read_bytes() or 0))
    (a, b, c), (d, e, f) = zip(*marks, strict=True)
    print(json.dumps({"pp": [b - a, e - d], "token": [(c - b) / n, (f - e) / n]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-mib", type=int, default=450)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        path, kind, folder = args.child
        return child(Path(path), kind, args.tokens, Path(folder))
    folder = group(args.limit_mib << 20)
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
            path = Path(made) / "experts.gguf"
            write(path, "qwen3-30b-a3b", "Q4_K", args.layers)
            print(f"{path.stat().st_size >> 20} MiB, a limit of {args.limit_mib} MiB")
            for kind in (*KINDS[:2], *KINDS):
                command = [sys.executable, __file__, "--tokens", str(args.tokens)]
                command += ["--child", str(path), kind, str(folder)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                told = json.loads(out.splitlines()[-1])
                print(f"{kind:<12}", end="")
                for what, (seconds, n_bytes) in told.items():
                    print(f"  {what} {seconds:7.3f} s {n_bytes / 2**20:7.1f} MiB read", end="")
                print(flush=True)
    finally:
        folder.rmdir()
    return None


if __name__ == "__main__":
    main()
