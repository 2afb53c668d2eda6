"""Batches that exercise a plan: prompts, texts that go on, long histories; from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OF_ROWS, EngineObserver
from treadle.kernels.run_state import MEDIA, PAGE, SPLIT, LogitsQuery
from treadle.kvcache.cache import Sequence
from treadle.models.switch import without_control_tokens

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.engine.prepared_plan import PlanKey, PreparedPlan
    from treadle.kvcache.prefix_tree import Lora

MANY = 150  # tokens of a batch in a plan for many; their number does not change kernels
OUTPUTS = 20  # rows of logits in a plan for many
N_SOURCE = PAGE + 9  # tokens of an encoder's prompt
HISTORY = PAGE + 5  # tokens before those of a text that goes on


@dataclass(frozen=True)
class PlacedBatch:
    """A batch laid out in the memory of a prepared plan, ``ready``. ``n_texts``: sequences in the
    batch; ``cut``: the part of the plan's size that the batch does not use, in words; "" if it uses
    all.
    """

    ready: PreparedPlan
    n_tokens: int
    n_outputs: int
    n_texts: int
    cut: str = ""
    parts: list[BatchItem] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The batch in words, such as ``3 texts, 4 tokens``."""
        texts = "text" if self.n_texts == 1 else "texts"
        tokens = "token" if self.n_tokens == 1 else "tokens"
        return f"{self.n_texts} {texts}, {self.n_tokens} {tokens}"


class RandomStates(EngineObserver):
    """Writes random values into the inputs that a plan takes from outside, such as a drafter's
    hidden states, but not into rows of pictures. ``output``: the name of the graph's output that
    the run computes.
    """

    def __init__(self, output: str, rng: np.random.Generator) -> None:
        self.output = output
        self._rng = rng

    def before_run(self, ready: PreparedPlan) -> None:
        """Write the random values into the plan's memory."""
        for label, buffer in ready.plan.takes.items():
            if label != MEDIA:  # rows of pictures have a place of their own in each run
                rows = self._rng.standard_normal(buffer.n_bytes // 4, np.float32)
                ready.arena.write(ready.plan.offsets[buffer], rows.view(np.uint8))


def n_tokens_of(engine: Engine, n_most: int, many: int = MANY) -> int:
    """Return the number of tokens of the batch that checks the plan for up to ``n_most`` tokens:
    for a plan of up to 4 tokens ``n_most``; for a larger one at most ``n_most - 1`` and ``many``,
    but more than the next smaller plan takes.
    """
    below = max((size for size in engine.few if size < n_most), default=0)
    if n_most <= 4:
        return n_most
    return max(below + 1, min(n_most - 1, many))


def new_sequence(engine: Engine) -> Sequence:
    """Return an empty sequence; in an encoder-decoder model, one that attends to a prompt of random
    tokens. The caller holds the engine's lock, and closes the sequence.
    """
    seq = engine.cache.sequence()
    if engine.encoder is not None:
        n = min(N_SOURCE, engine.n_ctx)
        source = np.random.default_rng(5).integers(0, engine.config.n_vocab, n)
        engine.attend(seq, source.tolist())
    return seq


@contextmanager
def batch_of(
    engine: Engine, key: PlanKey, rng: np.random.Generator, many: int = MANY
) -> Iterator[PlacedBatch]:
    """Lay out a batch of random tokens in the plan of ``key``, of at most ``many`` tokens; yield
    it, and drop its sequences afterwards. The caller holds the engine's lock.
    """
    of_logits = key.output in OF_ROWS
    n_tokens = n_tokens_of(engine, key.n_tokens, many)
    below = max((size for size in engine.few if size < key.n_outputs), default=0)
    n_outputs = min(n_tokens, max(below + 1, min(key.n_outputs, OUTPUTS)))
    seqs: list[Sequence] = []
    try:
        parts = []
        sizes = _sizes(engine, n_tokens) if of_logits else _texts(engine, n_tokens, key.n_outputs)
        if engine.lender is not None:  # such a run has a token of each text
            sizes = [1] * min(n_tokens, engine.lender.cache.n_sequences)
            n_tokens = len(sizes)
            n_outputs = min(n_outputs, n_tokens)
        left = n_outputs
        lora = _scales(engine.lender or engine, key)
        for i, n in enumerate(sizes):
            seq = _sequence(engine.lender or engine, rng, i, n, lora, goes_on=of_logits)
            seqs.append(seq)
            if engine.lender is not None:
                seq = Sequence(engine.cache, seq.ids, seq.pages, shifts=seq.shifts)
            wanted = min(left - min(left, len(sizes) - 1 - i), n) if of_logits else 0
            left -= wanted
            ids = _ids(engine, rng, n)
            if key.adapted and engine.config.switch is not None:  # adapters within the model
                ids[0] = engine.config.switch.tokens[i % engine.config.switch.n]
            parts.append(BatchItem(seq, ids, wanted, _queries(engine, rng, i)))
        ready, starts = engine.lay_out(key, parts)
        cut = ""
        if n_tokens < key.n_tokens and key.n_tokens > 4:
            cut = f"{n_tokens} of up to {key.n_tokens} tokens"
        yield PlacedBatch(ready, n_tokens, n_outputs, len(parts), cut, parts)
        for part, start in zip(parts, starts, strict=True):
            engine.cache.truncate(part.seq, start)
    finally:
        for seq in seqs:
            seq.close()


def _sizes(engine: Engine, n_tokens: int) -> list[int]:
    """Divide ``n_tokens`` among sequences: two that decode one token each, and a prompt of the
    rest; fewer sequences if there are few tokens, or the cache has room for fewer. Return the
    tokens of each.
    """
    room = engine.cache.n_sequences
    if n_tokens <= 2 or room < 3:
        return [1] * n_tokens if n_tokens <= min(2, room) else [n_tokens]
    return [1, 1, n_tokens - 2]


def _texts(engine: Engine, n_tokens: int, most: int) -> list[int]:
    """Divide ``n_tokens`` among one or two texts of an encoder's batch, at most ``most``; return
    the tokens of each.
    """
    if most < 2 or n_tokens < 3 or engine.cache.n_sequences < 2:
        return [n_tokens]
    return [n_tokens // 3, n_tokens - n_tokens // 3]


def _ids(engine: Engine, rng: np.random.Generator, n: int) -> list[int]:
    found: list[int] = rng.integers(0, engine.config.n_vocab, n).tolist()
    return without_control_tokens(engine.config.switch, found)


def _queries(engine: Engine, rng: np.random.Generator, i: int) -> tuple[LogitsQuery, ...]:
    """Return a sampler's queries for the ``i``-th text: the largest logits and the sum of
    exponentials; for texts of even ``i`` also under a random mask.
    """
    plain = LogitsQuery(total=True)
    if i % 2:
        return (plain,)
    n_bytes = -(-engine.config.n_vocab // 64) * 8
    mask = rng.integers(0, 256, n_bytes, np.uint8).tobytes()
    return plain, LogitsQuery(mask=mask, total=True)


def _scales(engine: Engine, key: PlanKey) -> Lora:
    """Return scales of 1, by number, for all adapters and control vectors that the plan of ``key``
    has.
    """
    n = len(engine.adapters)
    numbers = range(n + len(engine.control_vectors))
    return tuple((i, 1.0) for i in numbers if (key.adapted if i < n else key.steered))


def _sequence(
    engine: Engine, rng: np.random.Generator, i: int, n: int, lora: Lora, *, goes_on: bool
) -> Sequence:
    """Return the ``i``-th sequence of a batch, which is to run ``n`` tokens with the scales
    ``lora`` of adapters. If it ``goes_on``, it has a history: that of sequence 0 is longer than
    SPLIT keys where there is room, so that attention splits it.
    """
    cache = engine.cache
    seq = new_sequence(engine)
    seq.lora = lora
    room = min(engine.n_ctx, cache.n_tokens // max(1, cache.n_sequences)) - n - 1
    length = min(HISTORY, room, engine.max_tokens)
    in_parts = engine.config.causal or engine.config.draft is not None
    if not goes_on or not in_parts or length < 1:
        return seq
    given = RandomStates(engine.config.main_output, rng)
    engine.observe([BatchItem(seq, _ids(engine, rng, length), 0)], given)
    whole = length // PAGE * PAGE
    longer = min(SPLIT + 2 * PAGE + 3, room) - length
    plain = not cache.states and not any(p.window or p.chunk for p in cache.pools)
    if i or not whole or longer < PAGE or not plain:
        return seq
    # Keys and values of the tokens in between are copies: only their number matters here.
    sources = [list(pages[: whole // PAGE]) for pages in seq.pages]
    held = [len(pages) for pages in seq.pages]
    cache.extend(seq, _ids(engine, rng, longer))
    for pool, pages, begin, source in zip(cache.pools, seq.pages, held, sources, strict=True):
        for at in range(begin - 1, len(pages)):
            pool.copy(source[at % len(source)], pages[at])
    return seq
