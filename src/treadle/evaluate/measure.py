"""Runs the windows of a text through a model, and optionally through a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS
from treadle.errors import TreadleError
from treadle.evaluate.score import (
    Comparison,
    Doubles,
    Floats,
    Summary,
    compare,
    summarize,
    surprise,
)
from treadle.evaluate.windows import TokenWindows, WindowChunk, schedule

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import Sequence

N_SEQUENCES = 2  # windows in the cache at once: load the model with as many


class Reference(Protocol):
    """The reference's predictions: ``SavedLogits`` or ``ReferenceModel``."""

    cut_off: bool  # predictions are log-probabilities cut off at a floor, else logits

    n_vocab: int  # columns of ``read``

    def read(self, window: int, begin: int, end: int) -> Floats:
        """Return scored predictions ``begin`` to ``end`` (exclusive) of window number ``window``,
        float32 ``[end - begin, n_vocab]``: logits, or log-probabilities if ``cut_off``. Calls must
        follow the order of ``schedule``.
        """
        ...


class ReferenceModel:
    """Another model, run on the same windows as the measured one."""

    cut_off = False

    def __init__(self, engine: Engine, windows: TokenWindows) -> None:
        self.n_vocab = engine.config.n_vocab
        self._first = windows.first
        self._runs = _runs(engine, windows)

    def read(self, window: int, begin: int, end: int) -> Floats:
        """Run the model up to scored predictions ``begin`` to ``end`` (exclusive) of a window,
        which must be the next ones of ``schedule``; return their logits, float32 ``[end - begin,
        n_vocab]``.
        """
        for piece, _, logits in self._runs:
            if piece is not None:
                found = piece.window, piece.start - self._first, piece.end - self._first
                assert found == (window, begin, end), "references are read in order"
                assert logits is not None
                return logits
        raise AssertionError("read past the last window")


@dataclass(eq=False)
class Scores:
    """Scores of the tokens that ``measure`` has scored so far; both lists have one element for each
    scored chunk.

    ``nll``: negative log-likelihoods of the true tokens, in nats, float64 ``[n]``. ``compared``:
    comparisons with a reference; empty without one.
    """

    nll: list[Doubles] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)

    def summary(self) -> Summary:
        """Return the summary of all scores."""
        if self.compared:
            joined = Comparison.join(self.compared)
            return summarize(joined.nll, joined)
        return summarize(np.concatenate(self.nll))

    @property
    def perplexity(self) -> float:
        """The perplexity so far."""
        return float(np.exp(np.mean(np.concatenate(self.nll))))


Progress = Callable[[int, int, Scores], None]


def measure(
    engine: Engine,
    windows: TokenWindows,
    *,
    against: Reference | None = None,
    save: Callable[[Floats], None] | None = None,
    progress: Progress | None = None,
    as_written: bool = False,
) -> Scores:
    """Score ``windows`` with ``engine``. ``against``: reference to compare with, or None. ``save``
    is called with the logits of each scored chunk, float32 ``[n, n_vocab]``. ``progress(done,
    total, scores)`` counts tokens. ``as_written``: run scored tokens one by one, with the kernels
    of decoding.

    Engines must hold N_SEQUENCES sequences of ``windows.n_ctx`` tokens each. Logits of at most
    OUTPUTS tokens are in memory at once, for the model and for the reference.

    Raises TreadleError for a reference with another vocabulary, or a score that is not finite.
    """
    n_vocab = engine.config.n_vocab
    if against is not None and against.n_vocab != n_vocab:
        raise TreadleError(
            f"the vocabulary of the reference has {against.n_vocab} tokens, that of the model "
            f"{n_vocab}: their predictions cannot be compared"
        )
    out = Scores()
    done = 0
    total = len(windows) * (windows.n_ctx - 1)
    with ThreadPoolExecutor(engine.device.n_threads, "perplexity") as pool:
        for piece, n_tokens, logits in _runs(engine, windows, as_written=as_written):
            done += n_tokens
            if piece is not None:
                assert logits is not None
                begin = piece.start - windows.first
                end = piece.end - windows.first
                _score(out, logits, windows, piece.window, slice(begin, end), against, pool)
                if save is not None:
                    save(logits)
            if progress is not None:
                progress(done, total, out)
    return out


def _score(
    out: Scores,
    logits: Floats,
    windows: TokenWindows,
    window: int,
    at: slice,
    against: Reference | None,
    pool: ThreadPoolExecutor,
) -> None:
    targets = windows.targets(window)[at]
    if against is None:
        out.nll.append(surprise(logits, targets, pool))
    else:
        base = against.read(window, at.start, at.stop)
        out.compared.append(compare(logits, base, targets, pool, cut_off=against.cut_off))
        out.nll.append(out.compared[-1].nll)
    if not np.isfinite(out.nll[-1]).all():
        raise TreadleError("the model's predictions are not finite numbers: its file is damaged")


def _runs(
    engine: Engine, windows: TokenWindows, *, as_written: bool = False
) -> Iterator[tuple[WindowChunk | None, int, Floats | None]]:
    """Run the windows. Yield for each run its scored chunk, its number of tokens, and the chunk's
    logits, float32 ``[n, n_vocab]``; chunk and logits are None if the run only prefills.
    ``as_written``: as in ``measure``.
    """
    held: dict[int, Sequence] = {}  # by window
    ids: dict[int, list[int]] = {}
    try:
        for scored, others in schedule(windows, engine.max_tokens, OUTPUTS):
            pieces = [*others, *([scored] if scored else [])]
            parts = []
            for piece in pieces:
                if piece.window not in held:
                    held[piece.window] = engine.cache.sequence()
                    ids[piece.window] = windows.run_ids(piece.window)
                tokens = ids[piece.window][piece.start : piece.end]
                parts.append(BatchItem(held[piece.window], tokens, len(tokens) * piece.scored))
            logits = _written(engine, parts) if scored and as_written else engine.run(parts)
            yield scored, sum(len(part.ids) for part in parts), logits if scored else None
            if scored and scored.end == windows.n_ctx - 1:
                held.pop(scored.window).close()
    finally:
        for seq in held.values():
            seq.close()


def _written(engine: Engine, parts: list[BatchItem]) -> Floats:
    """Return the logits of the last of ``parts``, whose tokens are run one by one; prefill the
    other parts.
    """
    *others, scored = parts
    if others:
        engine.run(others)
    return np.concatenate([engine.run([BatchItem(scored.seq, [token], 1)]) for token in scored.ids])
