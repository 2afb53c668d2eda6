"""Servers under load, in turns: treadle, llama.cpp's server, llama-cpp-python's.

    python bench/random_model.py tinyllama Q8_0 tinyllama-Q8_0.gguf
    python bench/serve.py tinyllama-Q8_0.gguf --rivals /tmp/rivals

All servers of a model are up at once, and each number of streams is tried on one after the other.
N streams ask again as soon as they have their answer, for ``--seconds``; prompts are unlike each
other. If all have one length, all texts end together, and no prompt is read while others write;
with ``--spread 0.5`` lengths are 0.5 to 1.5 times ``--prompt`` and ``--tokens``. Then come single
situations, ``--cases``:

    b  one text is written, a prompt of 4096 tokens arrives: the longest gap between two tokens
    c  16 prompts that share 2048 tokens, at once: how many tokens were read
    d  a conversation of 20 turns that each add 500 tokens: how many tokens were read
    e  8 streams are left in the middle: seconds until the server is idle
    f  8 streams with a JSON schema, and without

What a server had first found when restarted (g) is timed by ``bench/restart.py``.

llama-cpp-python's writes one text at a time; it is tried with up to 4 streams, and without cases.

The generator reads sockets itself, and says what share of a core it took. A stream that has no
token when the time is over counts with the time that it has waited: rivals look better for it.

The folder of ``--rivals`` is made by these commands; without it treadle is measured alone:

    python -m venv venv && venv/bin/pip install scikit-build-core fastapi pydantic-settings \\
        sse-starlette starlette-context uvicorn diskcache jinja2 numpy
    venv/bin/pip download --no-binary :all: --no-deps --no-build-isolation llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && mv llama_cpp_python-*/ sdist
    cmake -G Ninja -S sdist/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF
    nice ninja -C build llama-server && ln -s ../../build/bin sdist/llama_cpp/lib
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

CONTEXT = 12_288  # of one text, in every server
BOS_AND_BLANK = 4  # tokens of a prompt before its letters, each of which is a token
TICKS = os.sysconf("SC_CLK_TCK")
SCHEMA = {
    "type": "object",
    # So many that an answer is as long as one without a schema.
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "minItems": 1000}},
    "required": ["tags"],
    "additionalProperties": False,
}
ORDER = random.Random(1)


# -- servers ----------------------------------------------------------------------------------


@dataclass
class Server:
    """A process that answers ``/v1/completions`` on a port of this machine."""

    name: str
    process: subprocess.Popen[bytes]
    port: int

    def cpu_s(self) -> float:
        """Seconds of processor time since its start."""
        line = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(line[11]) + int(line[12])) / TICKS

    def mib(self) -> float:
        """Memory that is its own: the model's file, which is mapped, not counted."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        return float("nan")


def commands(model: str, threads: int, streams: int, rivals: Path | None) -> Iterator[Any]:
    """Of each server: its name, its command but for the port, its variables."""
    most = str(streams)
    yield (
        "treadle",
        [
            sys.executable,
            "-m",
            "treadle",
            "serve",
            model,
            "-t",
            str(threads),
            "-c",
            str(CONTEXT),
            "--sequences",
            most,
            "--no-log",
        ],
        {},
    )
    if rivals is None:
        return
    built = rivals / "build" / "bin" / "llama-server"
    if not built.exists():
        print(f"llama.cpp is left out: there is no {built}")
    else:
        yield (
            "llama.cpp",
            [
                str(built),
                "-m",
                model,
                "-t",
                str(threads),
                "-tb",
                str(threads),
                "-np",
                most,
                "-c",
                str(streams * 1024),
                "--kv-unified",
                "--no-webui",
            ],
            {},
        )
    folder = rivals / "sdist"
    if not (folder / "llama_cpp" / "lib" / "libllama.so").exists():
        print(f"llama-cpp-python is left out: there is no library in {folder}/llama_cpp/lib")
    else:
        yield (
            "llama-cpp-python",
            [
                str(rivals / "venv" / "bin" / "python"),
                "-m",
                "llama_cpp.server",
                "--model",
                model,
                "--n_ctx",
                str(CONTEXT),
                "--n_threads",
                str(threads),
                "--n_threads_batch",
                str(threads),
                "--interrupt_requests",
                "False",
                "--verbose",
                "False",
            ],
            {"PYTHONPATH": str(folder)},
        )


@contextmanager
def started(name: str, command: list[str], variables: dict[str, str]) -> Iterator[Server]:
    """The server, as soon as it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(f"/tmp/bench-serve-{name}.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env={**os.environ, **variables}
        )
        try:
            wait_until_up(name, process, port)
            yield Server(name, process, port)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_up(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    """Until it lists its model and is healthy, if it knows what that is."""
    path = "/v1/models" if name == "llama-cpp-python" else "/health"
    for _ in range(1200):
        if process.poll() is not None:
            raise SystemExit(f"{name} has ended: see /tmp/bench-serve-{name}.log")
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise SystemExit(f"{name} does not answer")


# The three controls, which have no text, and the 256 bytes, which are held back until they are a
# letter: a gap between events is then one between tokens.
NO_BYTES = {str(i): -100 for i in range(259)}

# -- one stream -------------------------------------------------------------------------------


@dataclass
class Stream:
    """One answer as it came. Times are seconds of ``perf_counter``."""

    n_prompt: int
    began: float = 0.0
    times: list[float] = field(default_factory=list)  # of each event with text
    n_tokens: int = 0
    last: bytes = b""  # the event with the server's timings
    done: bool = False

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def timings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.last.partition(b"data: ")[2])["timings"]
        return found


def letters(n_tokens: int, order: random.Random = ORDER) -> str:
    """A text of so many tokens: the random models' words have no letters in common with it."""
    return "".join(order.choices(string.ascii_lowercase, k=n_tokens - BOS_AND_BLANK))


async def ask(
    server: Server,
    prompt: str,
    n_tokens: int,
    stream: Stream,
    enough: Callable[[Stream], bool] = lambda stream: False,
    **more: Any,
) -> Stream:
    """Have a text written; leave when it is ``enough``."""
    body = {
        "prompt": prompt,
        "max_tokens": n_tokens,
        "stream": True,
        "temperature": 0,
        "model": "x",
        "ignore_eos": True,
        "logit_bias": NO_BYTES,
        "cache_prompt": True,
        **more,
    }
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22)
    stream.began = time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\nConnection: close"
    head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            if b'"timings"' in line:
                stream.last = line
            text = line.partition(b'"text":')[2]
            if text.lstrip().startswith(b'""') or not text:
                continue
            stream.times.append(time.perf_counter())
            # A word of the vocabulary has one w; a server may put several into one event.
            stream.n_tokens += max(1, text.partition(b'"index"')[0].count(b"w"))
            if enough(stream):
                break
        else:
            stream.done = True
    finally:
        writer.close()
    return stream


# -- closed loop --------------------------------------------------------------------------------


@dataclass
class Load:
    """Results of N streams of one server."""

    streams: list[Stream]
    seconds: float
    cpu_s: float
    own_s: float
    mib: float

    def row(self) -> list[str]:
        first = [s.times[0] - s.began if s.times else self.waited(s) for s in self.streams]
        gaps = [gap for s in self.streams for gap in s.gaps] or [float("nan")]
        written = sum(s.n_tokens for s in self.streams)
        read = sum(s.n_prompt for s in self.streams if s.times)
        return [
            f"{written / self.seconds:.1f}",
            f"{(written + read) / self.seconds:.1f}",
            *(f"{np.percentile(first, p):.2f}" for p in (50, 99)),
            *(f"{1e3 * np.percentile(gaps, p):.0f}" for p in (50, 99)),
            f"{1e3 * self.cpu_s / max(written, 1):.0f}",
            f"{self.mib:.0f}",
            f"{self.own_s / self.seconds:.1%}",
        ]

    def waited(self, stream: Stream) -> float:
        """Of one that has no token: as long as it was waited for, which is too little."""
        return min(s.began for s in self.streams) + self.seconds - stream.began


HEAD = [
    "server",
    "N",
    "tok/s written",
    "tok/s with prompts",
    "TTFT p50 s",
    "p99",
    "ITL p50 ms",
    "p99",
    "CPU s per 1000",
    "own MiB",
    "generator",
]


async def closed_loop(server: Server, n: int, given: argparse.Namespace) -> Load:
    """N streams for so long. Every server is asked for the same lengths."""
    streams: list[Stream] = []

    async def worker(number: int) -> None:
        lengths = random.Random(number)

        def length(mean: int) -> int:
            return round(mean * lengths.uniform(1 - given.spread, 1 + given.spread))

        while True:
            n_prompt = length(given.prompt)
            n_tokens = length(given.tokens)
            streams.append(stream := Stream(n_prompt, time.perf_counter()))
            await ask(server, letters(n_prompt), n_tokens, stream)

    seconds = given.seconds
    cpu = server.cpu_s()
    own = time.process_time()
    workers = [asyncio.ensure_future(worker(i)) for i in range(n)]
    await asyncio.sleep(seconds)
    cpu = server.cpu_s() - cpu
    own = time.process_time() - own
    mib = server.mib()
    for each in workers:
        each.cancel()
    for result in await asyncio.gather(*workers, return_exceptions=True):
        if isinstance(result, Exception):
            print(f"{server.name}: {result!r}", file=sys.stderr)
    await until_idle(server)
    return Load(streams, seconds, cpu, own, mib)


async def until_idle(server: Server, most_s: float = 60.0) -> float:
    """Seconds until it takes no processor time any more."""
    began = time.perf_counter()
    last = server.cpu_s()
    since = time.perf_counter()
    while (now := time.perf_counter()) - since < 0.3 and now - began < most_s:
        await asyncio.sleep(0.01)
        if (cpu := server.cpu_s()) > last + 1.5 / TICKS:
            last = cpu
            since = time.perf_counter()
    return since - began


# -- cases --------------------------------------------------------------------------------------


async def case_b(server: Server, given: argparse.Namespace) -> str:
    """A long prompt beside a text."""
    writer = Stream(64)
    task = asyncio.ensure_future(
        ask(server, letters(64), 600, writer, enough=lambda _: reader.done)
    )
    reader = Stream(given.long)
    while len(writer.times) < 20:
        await asyncio.sleep(0.01)
    before = len(writer.times)
    await ask(server, letters(given.long), 2, reader)
    await task
    gaps = [b - a for a, b in zip(writer.times[before - 1 :], writer.times[before:], strict=False)]
    return (
        f"longest gap {1e3 * max(gaps):.0f} ms (median {1e3 * float(np.median(gaps)):.0f}), "
        f"the prompt's first token after {reader.times[0] - reader.began:.1f} s"
    )


async def case_c(server: Server, given: argparse.Namespace) -> str:
    """Prompts with a shared beginning."""
    n = 16
    shared = letters(given.shared)
    began = time.perf_counter()
    streams = [Stream(given.shared + 32) for _ in range(n)]
    await asyncio.gather(*(ask(server, shared + letters(36), 8, each) for each in streams))
    seconds = time.perf_counter() - began
    read = sum(each.timings()["prompt_n"] for each in streams)
    least = given.shared + n * 32
    return f"{read} tokens read, {least} would do; all ended after {seconds:.1f} s"


async def case_d(server: Server, given: argparse.Namespace) -> str:
    """A conversation that grows."""
    text = letters(given.turn)
    read = 0
    new = given.turn
    seconds = 0.0
    for turn in range(given.turns):
        stream = await ask(server, text, 16, Stream(0))
        read += stream.timings()["prompt_n"]
        seconds += stream.times[0] - stream.began
        if turn < given.turns - 1:
            text += letters(given.turn + BOS_AND_BLANK)
            new += given.turn
    return f"{read} tokens read of {new} new ones ({read / new - 1:+.1%}), {seconds:.1f} s of TTFT"


async def case_e(server: Server, given: argparse.Namespace) -> str:
    """Clients that leave."""
    streams = [Stream(128) for _ in range(8)]
    half = given.tokens // 2
    texts = [
        ask(server, letters(128), given.tokens, each, enough=lambda s: s.n_tokens >= half)
        for each in streams
    ]
    await asyncio.gather(*texts)
    step = float(np.median([gap for each in streams for gap in each.gaps]))
    idle = await until_idle(server)
    return f"idle {1e3 * idle:.0f} ms after the last has left; a step takes {1e3 * step:.0f} ms"


async def case_f(server: Server, given: argparse.Namespace) -> str:
    """A schema on all, in turns with none."""
    rates: dict[bool, list[float]] = {True: [], False: []}

    async def together(n: int, **more: Any) -> float:
        """Tokens per second, the prompts' time included."""
        began = time.perf_counter()
        asked = (ask(server, letters(32), given.tokens, Stream(32), **more) for _ in range(n))
        await asyncio.gather(*asked)
        return n * given.tokens / (time.perf_counter() - began)

    form = {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA}}
    await ask(server, letters(32), 4, Stream(32), response_format=form)  # compiles it
    for _ in range(5):
        for bound in (False, True):
            more = {"response_format": form} if bound else {}
            rates[bound].append(await together(8, **more))
    free, bound_rate = (float(np.median(rates[key])) for key in (False, True))
    return f"{bound_rate:.1f} tokens/s with, {free:.1f} without ({bound_rate / free - 1:+.1%})"


CASES = {"b": case_b, "c": case_c, "d": case_d, "e": case_e, "f": case_f}
SERIAL = "llama-cpp-python"  # writes one text at a time
SERIAL_MOST = 4  # more would only wait longer


# -- all ------------------------------------------------------------------------------------------


async def measure(servers: list[Server], given: argparse.Namespace) -> None:
    """Print the tables of one model."""
    for server in servers:
        await ask(server, letters(64), 8, Stream(64))
    print(f"\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for n in given.streams:
        for server in servers:
            if server.name == SERIAL and n > SERIAL_MOST:
                continue
            load = await closed_loop(server, n, given)
            print(f"| {server.name} | {n} | {' | '.join(load.row())} |", flush=True)
    print("\n| case | server | |\n|---|---|---|", flush=True)
    for case in given.cases:
        for server in servers:
            if server.name == SERIAL:
                continue
            try:
                said = await CASES[case](server, given)
            except (OSError, KeyError, ValueError, IndexError) as error:
                said = f"failed: {error!r}"
            print(f"| {case} | {server.name} | {said} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rivals", type=Path)
    parser.add_argument("--only", help="names of servers, by commas")
    parser.add_argument("--streams", default="1,4,8,16,32")
    parser.add_argument("--seconds", type=float, default=15, help="for each server and number")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="by what share of --prompt and --tokens lengths are longer and shorter",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default="bcdef")
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn", type=int, default=500)
    given = parser.parse_args()
    given.streams = [int(n) for n in given.streams.split(",")]
    for model in given.models:
        print(
            f"\n{Path(model).name}, {given.threads} threads, prompts of {given.prompt} tokens, "
            f"{given.tokens} written, each ± {given.spread:.0%}, {given.seconds:g} s",
            flush=True,
        )
        with ExitStack() as stack:
            listed = commands(model, given.threads, max(given.streams), given.rivals)
            chosen = [each for each in listed if not given.only or each[0] in given.only.split(",")]
            servers = [stack.enter_context(started(*each)) for each in chosen]
            asyncio.run(measure(servers, given))


if __name__ == "__main__":
    main()
