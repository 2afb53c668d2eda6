"""``treadle serve`` with several models: the time of a switch, and whether all answers are right.

    python bench/router.py switch FILE [FILE ...] [--rounds 5] [--rival llama-server]
    python bench/router.py pair FILE FILE [--seconds 10]
    python bench/router.py soak --text FILE [FILE ...] --vectors FILE --rerank FOLDER [--minutes 1]

``switch``: in turns, the first token of a call to a model that is not loaded, and the whole of a
warm ``treadle run MODEL hello -n 1``; the second's time is what a start costs anyway. With
``--rival`` also the same call to llama.cpp's router, its ``llama-server``, on the same files with
the same number of threads.

``pair``: two models that write at once, behind the router, whose engines take turns, and as two
servers, whose threads get in each other's way; tokens per second of each.

``soak``: some calls are made alone first, by the name of each model. Then clients make them at
random, all at once, with too little memory for all models; engines are killed, models are unloaded,
clients leave. Each answer must be the one of the call alone (``--deterministic``). The exit code is
1 where an answer was wrong or lost, or the engines had more memory than ``--memory``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from soak import Ask

PATIENCE_S = 300
ERRORS = (OSError, http.client.HTTPException)
PROMPTS = ["Once upon a time", "def add(a, b):", "The capital of France", "import os\n", "x = ["]


# -- servers --------------------------------------------------------------------------------------


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, and its process."""
    command = [sys.executable, "-m", "treadle", "serve", "--port", "0", "--no-log", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        if not url:
            raise SystemExit("the server did not start")
        yield url, server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def ask(url: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of a whole answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        raw = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, raw)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def names(url: str) -> list[str]:
    """The models, as the router calls them."""
    return [each["id"] for each in json.loads(ask(url, "/v1/models")[1])["data"]]


def state(url: str, name: str) -> str:
    """A model's state."""
    listed = json.loads(ask(url, "/v1/models")[1])["data"]
    value: str = next(each["status"]["value"] for each in listed if each["id"] == name)
    return value


def unload(url: str, name: str) -> None:
    """Unload a model, and wait for it."""
    ask(url, "/models/unload", {"model": name})
    while state(url, name) not in ("unloaded", "sleeping"):
        time.sleep(0.01)


# -- switch ---------------------------------------------------------------------------------------


def switch(files: list[str], rounds: int, rival: str | None) -> int:
    """Print the median seconds of each, and their difference, for each model."""
    # The router needs two models to be one.
    folder = [file for file in files if file != files[0]] or [str(demo())]
    with serving(files[0], *folder) as (url, _), rival_router(rival, files) as other:
        for name, file in zip(names(url), files, strict=False):
            first_s = []
            start_s = []
            rival_s = []
            for _ in range(rounds + 1):
                first_s.append(first_token(url, name))
                began = time.perf_counter()
                command = [sys.executable, "-m", "treadle", "run", file, "hello", "-n", "1"]
                subprocess.run(command, check=True, capture_output=True)
                start_s.append(time.perf_counter() - began)
                if other is not None:
                    rival_s.append(first_token(other, Path(file).stem))
            switched, started = (statistics.median(each[1:]) for each in (first_s, start_s))
            print(
                f"{name}: switch to the first token {switched:.3f} s, warm start {started:.3f} s, "
                f"difference {switched - started:+.3f} s (medians of {rounds})"
            )
            if rival_s:  # the first round compiles kernels, and reads files for the first time
                ratios = sorted(a / b for a, b in zip(first_s[1:], rival_s[1:], strict=True))
                print(
                    f"  llama.cpp's router {statistics.median(rival_s[1:]):.3f} s: "
                    f"{statistics.median(ratios):.2f} of it ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                )
    return 0


def first_token(url: str, name: str) -> float:
    """Seconds of a call for one token to a model that was unloaded before."""
    unload(url, name)
    began = time.perf_counter()
    status, text = ask(url, "/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 1})
    if status != 200:
        raise SystemExit(f"{url}: {name}: status {status}: {text[:300]!r}")
    return time.perf_counter() - began


@contextmanager
def rival_router(program: str | None, files: list[str]) -> Iterator[str | None]:
    """The address of llama.cpp's router with the same files; None without its program."""
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            Path(folder, Path(file).name).symlink_to(Path(file).resolve())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        n_threads = os.cpu_count() or 1
        command = [program, "--models-dir", folder, "--port", str(port), "-t", str(n_threads)]
        quiet = subprocess.DEVNULL
        server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        url = f"http://127.0.0.1:{port}"
        try:
            while not answers(url):
                if server.poll() is not None:
                    raise SystemExit(f"{program} ended with exit code {server.returncode}")
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            server.wait()


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        return ask(url, "/health")[0] == 200
    except ERRORS:
        return False


def demo() -> Path:
    """The model inside the package."""
    import treadle

    return Path(treadle.__file__).parent / "data" / "demo.gguf"


# -- two at once ----------------------------------------------------------------------------------


def writing(url: str, name: str, seconds: float, found: dict[str, float]) -> None:
    """Write texts with a model for a while; keep the tokens per second."""
    body = {"model": name, "prompt": "Once", "max_tokens": 64, "ignore_eos": True, "seed": 1}
    ask(url, "/v1/completions", {**body, "max_tokens": 1})
    n = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        n += json.loads(ask(url, "/v1/completions", body)[1])["usage"]["completion_tokens"]
    found[name] = n / (time.perf_counter() - began)


def together(places: list[tuple[str, str]], seconds: float) -> dict[str, float]:
    """Tokens per second of models that write at once, each at its server."""
    found: dict[str, float] = {}
    threads = [
        threading.Thread(target=writing, args=(url, name, seconds, found)) for url, name in places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def cpu_s(pids: list[int]) -> float:
    """Processor time of processes so far."""
    ticks = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pair(files: list[str], seconds: float) -> int:
    """Print both ways, in turns: tokens per second, and the share of both speeds alone together
    that is reached; processor time per token tells what waiting threads waste.
    """
    with (
        serving(*files) as (url, router),
        serving(files[0]) as (one, first),
        serving(files[1]) as (two, second),
    ):
        both = names(url)
        alone: dict[str, float] = {}
        for name in both:
            alone |= together([(url, name)], seconds)
        print("alone:      ", {name: round(speed, 1) for name, speed in alone.items()})
        ways = {
            "router:     ": ([(url, name) for name in both], [router.pid, *tree(router.pid)]),
            "two servers:": ([(one, both[0]), (two, both[1])], [first.pid, second.pid]),
        }
        for _ in range(3):
            for what, (places, pids) in ways.items():
                before = cpu_s(pids)
                found = together(places, seconds)
                cpu = cpu_s(pids) - before
                share = sum(speed / alone[name] for name, speed in found.items())
                each = 1000 * cpu / (seconds * sum(found.values()))
                shown = {name: round(speed, 1) for name, speed in found.items()}
                print(what, shown, f"share {share:.2f}, {each:.1f} ms of processor per token")
    return 0


# -- soak -----------------------------------------------------------------------------------------


def calls(texts: list[str], vectors: str | None, reranker: str | None) -> list[Ask]:
    """Texts whole and streamed, chats, vectors, ranks."""
    found = []
    for model in texts:
        for i, prompt in enumerate(PROMPTS):
            body: dict[str, Any] = {"model": model, "max_tokens": 6 + 5 * i, "seed": i}
            body |= {"stream": bool(i % 2), "temperature": 0 if i % 3 else 0.9}
            found.append(Ask("/v1/completions", json.dumps({**body, "prompt": prompt * (i + 1)})))
            body["stream"] = not body["stream"]
            messages = [{"role": "user", "content": prompt}]
            chat = {**body, "messages": messages}
            found.append(Ask("/v1/chat/completions", json.dumps(chat)))
    if vectors:
        for i in range(1, 4):
            body = {"model": vectors, "input": PROMPTS[:i]}
            found.append(Ask("/v1/embeddings", json.dumps(body)))
    if reranker:
        for prompt in PROMPTS[:3]:
            body = {"model": reranker, "query": prompt, "documents": PROMPTS}
            found.append(Ask("/v1/rerank", json.dumps(body)))
    return found


CUT = {
    b"engine_crashed": "cut by a kill",
    b"model_load_failed": "load cut by a kill",
    b"its load was cancelled": "load cancelled by an unload",
}


class CutError(Exception):
    """The answer says that the engine was killed, or its load cancelled; the text is which."""


def told(raw: bytes, status: int, stream: bool) -> Any:
    """Return the texts, vectors or ranks of an answer, without ids and times. Raises CutError."""
    for code, what in CUT.items():
        if code in raw:
            raise CutError(what)
    if status != 200:
        return status, raw
    if stream:
        blocks = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
        if not raw.rstrip().endswith(b"data: [DONE]"):
            raise http.client.IncompleteRead(raw)
        texts: dict[int, str] = {}
        for block in blocks:
            for choice in json.loads(block).get("choices", []):
                said = choice.get("text") or choice.get("delta", {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + said
        return texts
    value = json.loads(raw)
    if "choices" in value:
        return {
            each["index"]: each.get("text") or each["message"]["content"]
            for each in value["choices"]
        }
    return value.get("results") or [each["embedding"] for each in value["data"]]


@dataclass
class Findings:
    """Counts of what happened, and the first wrong answers."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_bytes: int = 0


def tree(root: int) -> dict[int, int]:
    """Parents of the processes below one, by their numbers."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
    below = {root: 0}
    while True:
        more = {pid: up for pid, up in parents.items() if up in below and pid not in below}
        if not more:
            del below[root]
            return below
        below |= more


def engines(root: int) -> list[int]:
    """The processes of the engines: children of the router's child."""
    found = tree(root)
    return [pid for pid, parent in found.items() if parent != root]


def own_bytes(pid: int) -> int:
    """A process's share of memory; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def soak(args: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    files = [*args.text, *([args.vectors] if args.vectors else [])]
    files += [args.rerank] if args.rerank else []
    options = ["--deterministic", "-c", "128", "--sequences", "4", "-t", str(args.threads)]
    found = Findings()
    with serving(*files, *options) as (url, _):
        known = names(url)
        n = len(args.text)
        vectors = known[n] if args.vectors else None
        asks = calls(known[:n], vectors, known[-1] if args.rerank else None)
        alone = {}
        for each in asks:
            status, raw = ask(url, each.path, json.loads(each.body))
            alone[each] = told(raw, status, each.stream)
            if status != 200:
                raise SystemExit(f"{each}: {raw!r}")
    print(f"{len(alone)} calls of {len(known)} models, each made alone")
    limits = ["--memory", str(args.memory), "--idle-unload", "5"]
    with serving(*files, *options, *limits) as (url, server):
        end = time.monotonic() + 60 * args.minutes
        over = threading.Event()
        workers = [
            threading.Thread(target=client, args=(url, alone, found, over, seed))
            for seed in range(args.clients)
        ]
        workers.append(threading.Thread(target=measure, args=(server.pid, found, over)))
        for worker in workers:
            worker.start()
        rng = random.Random(0)
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.5, 3))
            if rng.random() < 0.5 and (running := engines(server.pid)):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(rng.choice(running), signal.SIGKILL)
                    found.counts["kills"] += 1
            else:
                found.counts["unloads"] += 1
                ask(url, "/models/unload", {"model": rng.choice(known)})
        over.set()
        for worker in workers:
            worker.join()
        status, raw = ask(url, "/health")
        assert status == 200, raw
    print(", ".join(f"{n} {what}" for what, n in sorted(found.counts.items())))
    print(f"memory of all engines: at most {found.most_bytes >> 20} MiB of {args.memory} MiB")
    for line in found.wrong[:10]:
        print("WRONG", line)
    return int(bool(found.wrong) or found.most_bytes > args.memory << 20)


def measure(pid: int, found: Findings, over: threading.Event) -> None:
    """Keep the most memory of all engines together."""
    while not over.wait(0.3):
        total = sum(own_bytes(each) for each in engines(pid))
        found.most_bytes = max(found.most_bytes, total)


def client(
    url: str, alone: dict[Ask, Any], found: Findings, over: threading.Event, seed: int
) -> None:
    """Make calls at random until it is over; one that an engine's end has cut is made again."""
    rng = random.Random(seed)
    asks = list(alone)
    while not over.is_set():
        each = rng.choice(asks)
        if each.stream and rng.random() < 0.15:
            leave(url, each, rng)
            found.counts["left"] += 1
            continue
        for _ in range(50):
            try:
                status, raw = ask(url, each.path, json.loads(each.body))
                got = told(raw, status, each.stream)
            except CutError as error:
                found.counts[str(error)] += 1
                continue
            except ERRORS as error:
                found.wrong.append(f"{each}: {error!r}")
                break
            found.counts["right" if got == alone[each] else "wrong"] += 1
            if got != alone[each]:
                found.wrong.append(f"{each}: {got!r:.300} for {alone[each]!r:.300}")
            break
        else:
            found.wrong.append(f"{each}: no answer in 50 tries")


def leave(url: str, each: Ask, rng: random.Random) -> None:
    """Begin a call and leave, perhaps before its model is loaded."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request("POST", each.path, each.body)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.3))
        else:
            connection.getresponse().read(1)
    except ERRORS:
        pass
    finally:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("switch")
    one.add_argument("files", nargs="+")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--rival", metavar="PROGRAM", help="llama.cpp's llama-server")
    two = parts.add_parser("pair")
    two.add_argument("files", nargs=2)
    two.add_argument("--seconds", type=float, default=10)
    three = parts.add_parser("soak")
    three.add_argument("--text", nargs="+", required=True)
    three.add_argument("--vectors")
    three.add_argument("--rerank")
    three.add_argument("--minutes", type=float, default=1)
    three.add_argument("--clients", type=int, default=8)
    three.add_argument("--threads", type=int, default=2)
    three.add_argument("--memory", type=int, default=1200, help="MiB")
    args = parser.parse_args()
    if args.part == "switch":
        return switch(args.files, args.rounds, args.rival)
    if args.part == "pair":
        return pair(args.files, args.seconds)
    return soak(args)


if __name__ == "__main__":
    sys.exit(main())
