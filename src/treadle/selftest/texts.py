"""A text of the model: greedy, by the kernels, beside the forward pass of the numpy twins.

The kernels write some tokens after a prompt, one at a time. Then the twins run the whole text once,
and give the logits behind each of its tokens. The plans differ (a token at a time, many at once),
and so do their roundings of activations; so a token must be the twins' likeliest, or as close to it
as the logits of both are to each other.

The model inside the package also has a known text, written by the forward pass in float64 on
another machine, whose likeliest tokens are far ahead of all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.prepared_plan import PlanKey
from treadle.models.graphs import main_output
from treadle.selftest.kernel_check import run_twins

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.engine import Engine

Progress = Callable[[str, int, int], None]
PROMPT = "def fibonacci(n):"
N_TOKENS = 12
N_PROMPT = 9  # random tokens, of a model whose text is not known
MOST_WEIGHTS = 2_000_000_000  # that the twins unpack: some ten seconds for a thousand million
QUICK_WEIGHTS = 200_000_000
# How far the logits of two plans may be from each other, as a share of their spread: activations of
# 8 bits make 1 to 3 % in real models, another kernel's error makes 100 %.
MOST_APART = 0.15
LEAST_COSINE = 0.99  # of an encoder's vectors


@dataclass(frozen=True)
class TextCheck:
    """A text of kernels and twins. ``text``: what the kernels wrote; None for random tokens.

    apart: root mean square of the logits' differences, as a share of their spread; of an encoder
    the vectors' distance. known: whether the text is one known beforehand. problem: what is wrong,
    in a sentence; empty if nothing is. skipped: why the twins did not run.
    """

    n_tokens: int
    text: str | None
    apart: float
    known: bool = False
    problem: str = ""
    skipped: str = ""


def check_text(
    model: Model, *, quick: bool = False, progress: Progress | None = None
) -> TextCheck:
    """Compare a greedy text by kernels with the twins; see the module."""
    engine = model.engine
    n_weights = sum(int(np.prod(t.shape)) for t in model.gguf.tensors.values())
    most = QUICK_WEIGHTS if quick else MOST_WEIGHTS
    if main_output(engine.config) != "logits":
        return _check_vector(engine, n_weights, most, progress)
    known = known_text(model)
    ids = list(known[0]) if known else _prompt(engine)
    made = greedy(engine, ids, N_TOKENS)
    text = model.tokenizer.decode(made) if known else None
    if known and made != list(known[1]):
        at = next(i for i, (a, b) in enumerate(zip(made, known[1], strict=False)) if a != b)
        problem = (
            f"the known text is not written: token {at} is {made[at]}, expected {known[1][at]}"
        )
        return TextCheck(len(made), text, 0.0, True, problem)
    if n_weights > most:
        return TextCheck(len(made), text, 0.0, bool(known), skipped=_too_many(n_weights))
    ours, theirs = _logits(engine, ids, made, progress)
    return _judged(ours, theirs, made, text, bool(known))


def _too_many(n_weights: int) -> str:
    return f"{n_weights / 1e9:.1f} thousand million weights: numpy would take minutes"


def _judged(
    ours: np.ndarray, theirs: np.ndarray, made: list[int], text: str | None, known: bool
) -> TextCheck:
    """Compare logits ``[n, n_vocab]`` of kernels and twins behind each token of a text."""
    spread = float(np.std(theirs))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    if not finite.all():
        at = int(np.flatnonzero(~finite.all(-1))[0])
        return TextCheck(len(made), text, np.inf, known, f"logits of token {at} are no numbers")
    apart = float(np.sqrt(np.mean((ours - theirs) ** 2)) / max(spread, 1e-30))
    problem = ""
    if apart > MOST_APART:
        problem = (
            f"logits differ from the twins' by {apart:.0%} of their spread, at most "
            f"{MOST_APART:.0%} is expected"
        )
    off = np.abs(ours - theirs).max(-1)
    gap = theirs.max(-1) - theirs[np.arange(len(made)), made]
    wrong = np.flatnonzero(gap > 2 * off)
    if len(wrong) and not problem:
        at = int(wrong[0])
        problem = (
            f"token {at} is {made[at]}, the twins' is {int(theirs[at].argmax())}, by "
            f"{gap[at]:.4g}, and no logit differs by more than {off[at]:.4g}"
        )
    return TextCheck(len(made), text, apart, known, problem)


def _prompt(engine: Engine) -> list[int]:
    rng = np.random.default_rng(3)
    found: list[int] = rng.integers(0, engine.config.n_vocab, N_PROMPT).tolist()
    return found


def greedy(engine: Engine, ids: list[int], n: int) -> list[int]:
    """Return the likeliest ``n`` tokens after a prompt, each read before the next."""
    made: list[int] = []
    with engine.lock:
        seq = engine.cache.sequence()
        try:
            part = ids
            for _ in range(n):
                row = engine.run([BatchItem(seq, part)])[-1]
                made.append(int(np.nan_to_num(row, nan=-np.inf).argmax()))
                part = made[-1:]
        finally:
            seq.close()
            engine.cache.forget()
    return made


def _logits(
    engine: Engine, ids: list[int], made: list[int], progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of each token of ``made``: by kernels, token after token, and by the twins
    of a plan for all, float64 ``[n, n_vocab]``.
    """
    ours = []
    with engine.lock:
        seq = engine.cache.sequence()
        try:
            for part in (ids, *([token] for token in made[:-1])):
                ours.append(engine.run([BatchItem(seq, part)])[-1].astype(np.float64))
        finally:
            seq.close()
            engine.cache.forget()
    n = len(made)
    whole = [*ids, *made[:-1]]
    key = PlanKey(len(whole), n, "logits", bool(engine.adapters) and engine.deterministic)
    theirs = run_by_twins(engine, key, whole, n, "logits", engine.config.n_vocab, progress)
    return np.stack(ours), theirs


def run_by_twins(
    engine: Engine,
    key: PlanKey,
    ids: list[int],
    n_outputs: int,
    output: str,
    width: int,
    progress: Progress | None,
) -> np.ndarray:
    """Return an output of a text by the twins alone, float64 ``[rows, width]``; the cache is left
    as it was.
    """
    with engine.lock:
        seq = engine.cache.sequence()
        try:
            item = BatchItem(seq, ids, n_outputs)
            ready, starts = engine.lay_out(key, [item])
            plan = ready.plan
            n_steps = len(plan.steps)
            arena = np.zeros(plan.arena_bytes, np.uint8)
            cells = (*engine.cache.pools, *engine.cache.states)
            constants: dict[str, Any] = {
                each.const.name: each.const.memory.read(0, each.n_bytes).copy() for each in cells
            }

            def tell(step: int) -> None:
                if progress is not None:
                    progress("run the twins", step + 1, n_steps)

            run_twins(plan, ready.run, arena, constants, tell)
            buffer = plan.outputs[output]
            at = plan.offsets[buffer]
            rows = max(n_outputs, 1)
            found = arena[at : at + rows * buffer.row_bytes].view(np.float32)
            engine.cache.truncate(seq, starts[0])
        finally:
            seq.close()
    return found.reshape(rows, -1)[:, :width].astype(np.float64)


def _check_vector(
    engine: Engine, n_weights: int, most: int, progress: Progress | None
) -> TextCheck:
    """Compare an encoder's vector of some random tokens with the twins'."""
    ids = _prompt(engine)
    if n_weights > most:
        return TextCheck(len(ids), None, 0.0, skipped=_too_many(n_weights))
    ours = engine.embed([ids])[0].astype(np.float64)
    key = PlanKey(len(ids), 1, "embedding", bool(engine.adapters) and engine.deterministic)
    found = run_by_twins(engine, key, ids, 0, "embedding", len(ours), progress)
    theirs = found[0]
    cosine = float(ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
    problem = ""
    if not cosine >= LEAST_COSINE:
        problem = f"the vector's cosine with the twins' is {cosine:.6f}, expected {LEAST_COSINE}"
    return TextCheck(len(ids), None, 1 - cosine, problem=problem)


# -- known texts -----------------------------------------------------------------------------------

# The model inside the package, by the sha256 of its file: ids of a prompt, and what follows.
KNOWN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}


def known_text(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return a known prompt and text of a model, as ids; None if there is none."""
    sizes = {each.n_bytes for each in (model.gguf,)}
    if not KNOWN or not sizes & {KNOWN_BYTES}:
        return None
    with open(model.gguf.path, "rb") as file:
        return KNOWN.get(hashlib.sha256(file.read()).hexdigest())


KNOWN_BYTES = 0  # the size of that file: others are not read
