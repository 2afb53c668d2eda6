"""A server for a long while: mixed calls, clients that leave, kills and restarts.

    python bench/soak.py [MODEL] [--minutes 30] [--clients 12]

Some dozens of calls are made alone first. Then clients make them at random, all at once, and each
answer must be the one of the call alone (the server is ``--deterministic``). Some clients leave in
the middle. In the first half of the time the server is killed now and then, or told to stop, and
started again on the same port; then it is left alone, and its memory must stay flat.

The exit code is 1 where an answer was wrong, one was lost though the server lived, or memory grew.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = 512
PATIENCE_S = 300
ERRORS = (OSError, http.client.HTTPException)
PROMPTS = ["def add(a, b):", "import os\n", "class Tree:\n    def ", "x = [", "for i in "]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 999}, "name": {"type": "string"}},
    "required": ["n", "name"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """One call: its path, its body as JSON."""

    path: str
    body: str

    @property
    def stream(self) -> bool:
        return bool(json.loads(self.body).get("stream"))


def calls() -> Iterator[Ask]:
    """Texts and chats, streamed and whole, short and long prompts, seeds, schemas, log-probs."""
    shared = "# A long beginning that many prompts share.\n" * 8
    for i, prompt in enumerate(PROMPTS * 4):
        text = shared + prompt if i % 3 == 0 else prompt * (1 + i % 4)
        body: dict[str, Any] = {"max_tokens": 8 + 6 * (i % 7), "seed": i, "stream": bool(i % 2)}
        body |= {"temperature": 0} if i % 5 == 0 else {"temperature": 0.9}
        body |= {"ignore_eos": True} if i % 4 == 1 else {}
        if i % 6 == 5:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        if i % 3 == 1:
            messages = [{"role": "user", "content": text}]
            yield Ask("/v1/chat/completions", json.dumps({**body, "messages": messages}))
        else:
            more = {"logprobs": 2} if i % 7 == 3 else {"n": 1 + i % 3}
            yield Ask("/v1/completions", json.dumps({**body, **more, "prompt": text}))


def told(raw: bytes, stream: bool) -> Any:
    """Return each choice's text and end, without ids, times and how a stream was cut."""
    if stream:
        blocks = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
        events = [json.loads(block) for block in blocks]
        if not raw.rstrip().endswith(b"data: [DONE]"):
            raise http.client.IncompleteRead(raw)
    else:
        events = [json.loads(raw)]
    said: dict[int, list[Any]] = {}
    for event in events:
        if "error" in event:
            raise Refused(event["error"]["message"])
        for choice in event["choices"]:
            own = said.setdefault(choice["index"], ["", None])
            part = choice.get("delta") or choice.get("message") or choice
            own[0] += part.get("content") or part.get("text") or ""
            own[1] = choice["finish_reason"] or own[1]
    return said


class Refused(Exception):
    """The server was there and gave an error."""


class Left(Exception):
    """This client has left."""


@dataclass
class Server:
    """``treadle serve`` on one port, as often as it is started."""

    model: list[str]
    port: int = 0
    n_starts: int = 0
    lives: int = 0  # counts starts and ends: unchanged means that it lived all the while
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "treadle", "serve", *self.model, "--port", str(self.port)]
        command += ["-t", "2", "-c", str(CONTEXT), "--sequences", "3", "--deterministic"]
        command += ["--no-log", "--grace", "2"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit("the server did not start")
        self.lives += 1
        self.n_starts += 1

    def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.lives += 1
        self.process.send_signal(number)
        self.process.communicate(timeout=60)

    def kib(self) -> int:
        """Memory that is its own."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0])


def answer(port: int, ask: Ask, leave_after: int | None = None) -> Any:
    """Return the server's answer. Raises Refused, Left, and one of ERRORS where it dies."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", ask.path, ask.body, {"content-type": "application/json"})
        got = connection.getresponse()
        if leave_after is not None:
            got.read1(leave_after)
            raise Left
        raw = got.read()
        if got.status != 200:
            raise Refused(f"{got.status} {raw[:200]!r}")
        return told(raw, ask.stream)
    finally:
        connection.close()


class Soak:
    """Clients and what has come of their calls."""

    def __init__(self, server: Server, asks: list[Ask], seed: int) -> None:
        self.server = server
        self.asks = asks
        self.seed = seed
        self.alone = {ask: answer(server.port, ask) for ask in asks}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        """Calls at random until it is over."""
        order = random.Random(self.seed * 1000 + number)
        while not self.over.is_set():
            ask = order.choice(self.asks)
            life = self.server.lives
            leaves = order.random() < 0.2
            if leaves and not ask.stream:
                leave = order.randrange(1, 20)
            else:
                leave = order.randrange(1, 3000)
            try:
                said = answer(self.server.port, ask, leave if leaves else None)
                self.note("answered")
                if said != self.alone[ask]:
                    self.fail(f"wrong: {ask.body}: {said} instead of {self.alone[ask]}")
            except Left:
                self.note("left")
            except (Refused, *ERRORS) as error:
                if self.server.lives == life and life % 2:
                    self.fail(f"lost: {ask.body}: {error!r}")
                self.note("cut by an end of the server")
                time.sleep(0.25)

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def fail(self, said: str) -> None:
        with self._lock:
            self.wrong.append(said)

    def run(
        self,
        seconds: float,
        n_clients: int,
        restart_s: float,
        enough: Callable[[], bool] = lambda: True,
    ) -> list[int]:
        """KiB of the server's own memory, now and then, since it was last started.

        A slow machine has up to PATIENCE_S more until there is ``enough``.
        """
        clients = [threading.Thread(target=self.client, args=(i,)) for i in range(n_clients)]
        for each in clients:
            each.start()
        order = random.Random(self.seed)
        began = time.monotonic()
        memory = []
        next_end = began + restart_s
        try:
            while (now := time.monotonic()) < began + seconds or (
                now < began + seconds + PATIENCE_S and not enough()
            ):
                time.sleep(min(0.5, seconds / 20))
                late = self.server.n_starts == 1 and restart_s < seconds
                if next_end <= now and (late or now < began + seconds / 2):
                    number = order.choice([signal.SIGKILL, signal.SIGTERM])
                    self.server.end(number)
                    self.note(number.name)
                    self.server.start()
                    next_end = time.monotonic() + restart_s * (0.5 + order.random())
                    memory.clear()
                memory.append(self.server.kib())
        finally:
            self.over.set()
            for each in clients:
                each.join()
        return memory


def grown(memory: list[int]) -> float:
    """By how much the last fifth is above the second one, as a share of it."""
    fifth = max(len(memory) // 5, 1)
    early = memory[fifth : 2 * fifth] or memory[:1]
    late = memory[-fifth:]
    return sum(late) / len(late) / (sum(early) / len(early)) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help="by default the packaged one")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--restart", type=float, default=45, metavar="S", help="between two ends")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    server = Server(given.model)
    server.start()
    try:
        soak = Soak(server, list(calls()), given.seed)
        memory = soak.run(60 * given.minutes, given.clients, given.restart)
    finally:
        server.end(signal.SIGTERM)
    for what, n in sorted(soak.counts.items()):
        print(f"{n:8} {what}")
    growth = grown(memory)
    print(f"own memory {memory[0] / 1024:.0f} to {memory[-1] / 1024:.0f} MiB, growth {growth:+.1%}")
    for said in soak.wrong[:20]:
        print(said)
    print(f"{len(soak.wrong)} wrong or lost")
    return int(bool(soak.wrong) or growth > 0.05)


if __name__ == "__main__":
    sys.exit(main())
