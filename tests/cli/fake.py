"""A model without weights: what the command line sees of the engine, and nothing behind it.

``python -m tests.cli.fake ARGS`` is the real command line over it, for tests with real processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from treadle.errors import ContextFullError
from treadle.models.archs import ARCHS
from treadle.sampling.settings import Sampling

BOS = 256  # after the 256 byte values


@dataclass
class FakeTimings:
    n_prompt: int = 0
    n_cached: int = 0
    prefill_s: float = 0.5
    n_generated: int = 0
    decode_s: float = 0.25
    load_s: float = 0.01
    compile_s: float = 1.5
    media_s: float = 0.0


class FakeGeneration:
    """Pieces of a fixed text, a word each."""

    def __init__(self, pieces: Sequence[str], prompt_ids: list[int], n_ctx: int, pause_s: float):
        self.prompt_ids = prompt_ids
        self.media: Sequence[Any] = ()
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.timings = FakeTimings(n_prompt=len(prompt_ids), n_cached=1)
        self._pieces = iter(pieces)
        self._n_ctx = n_ctx
        self._pause_s = pause_s

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self.prompt_ids) + len(self.ids) >= self._n_ctx:
            self.finish_reason = "context"
            raise StopIteration
        piece = next(self._pieces, None)
        if piece is None:
            self.finish_reason = self.finish_reason or "stop"
            raise StopIteration
        time.sleep(self._pause_s)
        self.ids.append(len(self.ids))
        self.timings.n_generated = len(self.ids)
        self.text += piece
        return piece


class FakeSession:
    def __init__(self, calls: list[Any]):
        self.calls = calls
        self.ids: list[int] = []
        self.seq = self  # what a part of a batch names

    @property
    def n_past(self) -> int:
        return len(self.ids)

    def truncate(self, n: int) -> None:
        self.calls.append(("truncate", n))
        del self.ids[n:]

    def reset(self) -> None:
        self.ids = []

    def feed(self, ids: list[int]) -> None:
        self.ids += ids
        self.calls.append(("feed", len(ids), self.n_past))

    def close(self) -> None:
        self.ids = []


@dataclass
class FakeEngine:
    calls: list[Any]
    step_s: float = 1e-6  # a token
    device: Any = None
    max_tokens: int = 512
    encoder: Any = None
    kernels: Any = field(
        default_factory=lambda: SimpleNamespace(n_compiled=20, n_cached=1, seconds=1.5)
    )

    def run(self, parts: Sequence[Any]) -> None:
        for part in parts:
            part.seq.ids += part.ids
        self.calls.append(("run", [(len(part.ids), part.seq.n_past) for part in parts]))

    def run_timed(self, parts: Sequence[Any]) -> list[tuple[str, float]]:
        self.run(parts)
        n = sum(len(part.ids) for part in parts)
        return [(step.label, self.step_s * n) for step in FakeModel().plan(n)]


@dataclass(frozen=True)
class FakeStep:
    label: str
    kernel: str
    shape: tuple[int, ...]
    n_bytes: int
    n_flops: int  # of one token, or output
    grid: Any = field(default_factory=lambda: SimpleNamespace(count="n_tokens"))
    key_bytes: int = 0  # that a token in the cache makes each later one read
    key_flops: int = 0

    def cost(self, parts: Sequence[tuple[int, int]], n_outputs: int = 1) -> tuple[int, int]:
        rows = n_outputs if self.grid.count == "n_outputs" else sum(n for _, n in parts)
        seen = sum((before + 1) * n for before, n in parts)
        n_bytes = self.n_bytes if rows else 0
        return n_bytes + seen * self.key_bytes, rows * self.n_flops + seen * self.key_flops


class FakePlan(list[FakeStep]):
    n_tokens = 512


@dataclass(frozen=True)
class FakeTensor:
    type_name: str
    n_bytes: int


@dataclass
class FakeModel:
    """Answers with ``text``, a word at a time, whatever it is asked; `calls` tells what it was."""

    path: Path = Path("fake.gguf")
    text: str = "the quick brown fox"
    n_ctx: int = 64
    n_threads: int = 2
    isa: Any = field(default_factory=lambda: SimpleNamespace(name="portable"))
    pause_s: float = 0.0
    interrupt_at: int | None = None  # the piece before which Ctrl-C is pressed
    calls: list[Any] = field(default_factory=list)
    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            n_vocab=257,
            n_ctx_train=4096,
            main_output="logits",
            scores=False,
            arch=ARCHS["llama"],
            encoder=None,
            switch=None,
        )
    )
    gguf: Any = field(
        default_factory=lambda: SimpleNamespace(
            tensors={"output": FakeTensor("F32", 288), "w": FakeTensor("Q8_0", 360)},
            paths=[],
            n_bytes=648,
        )
    )

    sampling: Sampling = field(default_factory=Sampling)
    opening: str = ""  # how every prompt ends
    template: Any = field(
        default_factory=lambda: SimpleNamespace(
            builtin=None, source="", tool_source="", preserve=None
        )
    )

    def tokenize(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        self.calls.append(("tokenize", text, bos, special))
        return ([] if bos is False else [BOS]) + list(text.encode())

    def detokenize(self, ids: list[int], *, special: bool = False) -> str:
        return self.opening if special else bytes(ids).decode()

    def pieces(self) -> Iterator[str]:
        for i, word in enumerate(self.text.split(" ")):
            if i == self.interrupt_at:
                raise KeyboardInterrupt
            if word == "!bug":
                raise RuntimeError("a bug")
            yield word if i == 0 else " " + word

    def generate(self, prompt: list[int], **settings: Any) -> FakeGeneration:
        self.calls.append(("generate", prompt, settings))
        return self.answer(prompt, settings)

    def chat(self, messages: list[dict[str, str]], **settings: Any) -> FakeGeneration:
        self.calls.append(("chat", [dict(message) for message in messages], settings))
        return self.answer([BOS] * sum(len(m["content"]) for m in messages), settings)

    def answer(self, ids: list[int], settings: dict[str, Any]) -> FakeGeneration:
        if len(ids) >= self.n_ctx:
            raise ContextFullError(f"{len(ids)} tokens do not fit in a context of {self.n_ctx}")
        generation = FakeGeneration((), ids, self.n_ctx, self.pause_s)
        limit = settings.get("max_tokens")
        generation._pieces = self.pieces()
        if limit is not None:
            generation._pieces = islice(self.pieces(), limit)
            generation.finish_reason = "length"
        return generation

    def session(self) -> FakeSession:
        return FakeSession(self.calls)

    @property
    def engine(self) -> FakeEngine:
        return FakeEngine(self.calls)

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> FakePlan:
        assert n_tokens <= self.engine.max_tokens, "the real one raises"
        outputs = SimpleNamespace(count="n_outputs")
        return FakePlan(
            [
                FakeStep("token_embd", "embed_F32", (n_tokens, 8), 32, 0),
                FakeStep("L0.attn.qkv", "gemv_Q8_0_q8_k8", (24, 8), 216, 384),
                FakeStep("L5.attn", "attention_q8_0_n_head1", (), 0, 0, key_bytes=2, key_flops=4),
                FakeStep("L5.ffn.gate", "gemv_Q8_0_q8_k8", (16, 8), 144, 256),
                FakeStep("output", "gemv_F32_f32_k8", (9, 8), 288, 144, outputs),
            ]
        )

    def close(self) -> None:
        self.calls.append(("close",))


def install(model: FakeModel) -> None:
    """Make `treadle.load` give ``model``, in this process, for good."""
    import treadle

    def load(path: Path, **settings: Any) -> FakeModel:
        model.path = path
        return model

    vars(treadle)["load"] = load


if __name__ == "__main__":
    from treadle.cli import main

    words = " ".join(f"word{i}" for i in range(100_000))
    install(FakeModel(text=words, n_ctx=1_000_000, pause_s=0.001))
    sys.exit(main())
