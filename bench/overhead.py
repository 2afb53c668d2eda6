"""Cost of the server in a step: time between two runs of the engine, and processor time of its
event loop, while N streams are written.

    nice python bench/overhead.py MODEL [--streams 32] [--tokens 128] [--threads 2]

The server is a process of its own that notes when each run of the engine began and ended; this one
is its clients. Only steps that had all streams count. ``generate_many`` does the same work in
one process, without a server. The figure to watch: less than 3 % for both parts together. The
machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import treadle
from treadle.api.model import Model

Run = tuple[float, float, int, float]  # began, ended, sequences, CPU seconds of the event loop


def noted(model: Model, loop_cpu: Any = lambda: 0.0) -> list[Run]:
    """Return a list that gets each run of the engine."""
    runs: list[Run] = []
    sample = model.engine.sample
    run = model.engine.device.run
    n = 0

    def sampled(parts: Any) -> Any:
        nonlocal n
        n = len(parts)
        return sample(parts)

    def timed(*args: Any, **given: Any) -> bool:
        began = time.perf_counter()
        made = run(*args, **given)
        runs.append((began, time.perf_counter(), n, loop_cpu()))
        return made

    engine: Any = model.engine
    engine.sample = sampled
    engine.device.run = timed
    return runs


def told(name: str, runs: list[Run], n: int, threads: int) -> None:
    """A line: steps that had all ``n``, and what was between them."""
    pairs = [(a, b) for a, b in pairwise(runs) if a[2] == b[2] == n]
    if len(pairs) < 8:
        sys.exit(f"{name}: {len(pairs)} steps of all {n} streams are too few: more --tokens")
    step = median(b[1] - b[0] for _, b in pairs)
    gap = median(b[0] - a[1] for a, b in pairs)
    loop = (pairs[-1][1][3] - pairs[0][0][3]) / (runs.index(pairs[-1][1]) - runs.index(pairs[0][0]))
    share = gap / (step + gap)
    print(
        f"{name:14} {len(pairs):4} steps: run {1e3 * step:.2f} ms, between two {1e3 * gap:.3f} ms "
        f"({share:.1%}); event loop {1e3 * loop:.3f} ms of a core ({loop / (step + gap):.1%})"
    )


def serve(path: str, threads: int, n: int, tokens: int, notes: str) -> None:
    """The server, until SIGTERM; then its runs are written to ``notes``."""
    from treadle.server.requests.service import ServerSettings
    from treadle.server.serve import serve

    context = 32 + tokens
    with treadle.load(path, threads=threads, context=context, n_sequences=n + 1) as model:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        runs = noted(model, lambda: time.clock_gettime(clock))
        serve(model, ServerSettings(), 0, 1.0, lambda url: print(url, flush=True))
    Path(notes).write_text(json.dumps(runs))


async def stream(port: int, prompt: str, tokens: int) -> None:
    asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while await reader.read(1 << 16):
        pass
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    given = parser.parse_args()
    n = given.streams
    tokens = given.tokens
    threads = given.threads
    if given.notes:
        serve(given.model, threads, n, tokens, given.notes)
        return
    prompts = [f"{chr(97 + i % 26)} text number {i}" for i in range(n)]
    with TemporaryDirectory() as folder:
        notes = os.path.join(folder, "runs")
        command = [sys.executable, *sys.argv, "--notes", notes]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])

            async def all_streams() -> None:
                await asyncio.gather(*(stream(port, prompt, tokens) for prompt in prompts))

            asyncio.run(all_streams())
        finally:
            process.terminate()
            process.wait(30)
        told("server", json.loads(Path(notes).read_text()), n, threads)
    with treadle.load(
        given.model, threads=threads, context=32 + tokens, n_sequences=n + 1
    ) as model:
        runs = noted(model)
        list(model.generate_many(prompts, max_tokens=tokens, temperature=0, ignore_eos=True))
        told("generate_many", runs, n, threads)


if __name__ == "__main__":
    main()
