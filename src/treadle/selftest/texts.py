"""Compares a greedy text of the model with the forward pass of the numpy twins.

The kernels write some tokens after a prompt, one at a time. Then the kernels of a plan for many
tokens, and the twins of the same plan, run the whole text once, and give the logits behind each of
its tokens. Both round activations at the same places, so their logits are close; those of the
tokens written one at a time are rounded elsewhere. A token must be the twins' likeliest, or as
close to it as the logits are to each other.

The model inside the package also has a known text: the likeliest tokens of the forward pass in
float64, computed elsewhere, each far ahead of all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import BatchItem
from treadle.engine.prepared_plan import PlanKey
from treadle.errors import TreadleError
from treadle.selftest.batches import new_sequence
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
# How far logits may be from each other, as a share of their spread. Of one plan: codes of 8 bits
# that round the other way, 0.1 to 1 % in real models. Of two plans: all roundings of activations, 1
# to 10 %. Another kernel's error makes 100 %.
MOST_APART = 0.1
MOST_OF_PLANS = 0.3
LEAST_COSINE = 0.99  # of an encoder's vectors


@dataclass(frozen=True)
class TextCheck:
    """The comparison of a text by kernels with the twins: ``ids`` that the kernels wrote, or that
    an encoder read.

    text: the ids decoded; None without a vocabulary.
    apart: root mean square of the differences of kernels' and twins' logits in one plan, as a share
        of their spread; of an encoder 1 minus the cosine of its vector and the twins'.
    of_plans: such a share for logits of kernels run a token at a time and many tokens at once.
    known: whether a text known beforehand was expected.
    problem: the first fault, in a sentence; empty if there is none. skipped: why the twins did not
        run; empty if they did.
    """

    ids: tuple[int, ...]
    text: str | None = None
    apart: float = 0.0
    of_plans: float = 0.0
    known: bool = False
    problem: str = ""
    skipped: str = ""


def check_text(model: Model, *, quick: bool = False, progress: Progress | None = None) -> TextCheck:
    """Compare a greedy text by the kernels with the known one, if any, and with the numpy twins; of
    an encoder, compare a vector. The twins of models above MOST_WEIGHTS weights are skipped, if
    ``quick`` those of models above QUICK_WEIGHTS.
    """
    engine = model.engine
    n_weights = sum(int(np.prod(t.shape)) for t in model.gguf.tensors.values())
    most = QUICK_WEIGHTS if quick else MOST_WEIGHTS
    if engine.config.main_output != "logits":
        return _check_vector(engine, n_weights, most, progress)
    known = known_text(model)
    ids = list(known.prompt) if known else _prompt(model)
    compare = n_weights <= most
    found = text_of(engine, ids, known, compare=compare, progress=progress)
    skipped = "" if compare or found.problem else _too_many(n_weights)
    return replace(found, text=_decoded(model, found.ids), skipped=skipped)


def text_of(
    engine: Engine,
    ids: list[int],
    known: KnownText | None = None,
    *,
    compare: bool = True,
    progress: Progress | None = None,
) -> TextCheck:
    """Generate a greedy text after a prompt's ``ids``; compare it with ``known``, if given, and
    with the numpy twins if ``compare``.
    """
    made, ours = greedy(engine, ids, len(known.ids) if known else N_TOKENS)
    result = TextCheck(tuple(made), known=known is not None)
    if known and result.ids != known.ids:
        at = next(i for i, (a, b) in enumerate(zip(made, known.ids, strict=True)) if a != b)
        problem = (
            f"the known text is not written: token {at} is {made[at]}, expected {known.ids[at]}, "
            f"which is ahead by {known.lead} at least"
        )
        return replace(result, problem=problem)
    if not compare:
        return result
    together, theirs = _logits(engine, ids, made, progress)
    apart, of_plans, problem = judged(ours, together, theirs, made)
    return replace(result, apart=apart, of_plans=of_plans, problem=problem)


def _too_many(n_weights: int) -> str:
    return f"{n_weights / 1e9:.1f} thousand million weights: numpy would take minutes"


def judged(
    ours: np.ndarray, together: np.ndarray, theirs: np.ndarray, made: list[int]
) -> tuple[float, float, str]:
    """Compare logits ``[n, n_vocab]``, whose i-th row token i of ``made`` was chosen from: of
    kernels run a token at a time (``ours``) and many at once (``together``), and of the twins
    (``theirs``). Return ``TextCheck``'s ``apart``, ``of_plans`` and ``problem``.
    """
    for what, rows in (("kernels", ours), ("kernels", together), ("twins", theirs)):
        if not np.isfinite(rows).all():
            at = int(np.flatnonzero(~np.isfinite(rows).all(-1))[0])
            return np.inf, np.inf, f"logits of token {at} by the {what} are no numbers"
    spread = max(float(np.std(theirs)), 1e-30)
    apart, of_plans = (
        float(np.sqrt(np.mean((a - b) ** 2))) / spread
        for a, b in ((together, theirs), (ours, together))
    )
    for share, most, what in (
        (apart, MOST_APART, "logits differ from the twins'"),
        (of_plans, MOST_OF_PLANS, "logits of a token at a time differ from those of many at once"),
    ):
        if share > most:
            return apart, of_plans, f"{what} by {share:.0%} of their spread, expected {most:.0%}"
    off = np.abs(ours - theirs).max(-1)
    gap = theirs.max(-1) - theirs[np.arange(len(made)), made]
    wrong = np.flatnonzero(gap > 2 * off)
    if not len(wrong):
        return apart, of_plans, ""
    at = int(wrong[0])
    return (
        apart,
        of_plans,
        f"token {at} is {made[at]}, the twins' is {int(theirs[at].argmax())}, by {gap[at]:.4g}, "
        f"and no logit differs by more than {off[at]:.4g}",
    )


def _prompt(model: Model) -> list[int]:
    """Return the ids of ``PROMPT``, or random ones of a model without a vocabulary."""
    try:
        found = model.tokenize(PROMPT)
        if found:
            return list(found)
    except TreadleError:
        pass
    return _random_ids(model.engine)


def _decoded(model: Model, ids: Sequence[int]) -> str | None:
    try:
        return str(model.tokenizer.decode(list(ids)))
    except TreadleError:
        return None


def _random_ids(engine: Engine) -> list[int]:
    rng = np.random.default_rng(3)
    found: list[int] = rng.integers(0, engine.config.n_vocab, N_PROMPT).tolist()
    return found


def greedy(engine: Engine, ids: list[int], n: int) -> tuple[list[int], np.ndarray]:
    """Generate ``n`` tokens greedily after the prompt ``ids``, one run for each. Return them, and
    the logits from which each was chosen, float64 ``[n, n_vocab]``.
    """
    made: list[int] = []
    rows = []
    with engine.lock:
        seq = new_sequence(engine)
        try:
            part = ids
            for _ in range(n):
                rows.append(engine.run([BatchItem(seq, part)])[-1].astype(np.float64))
                made.append(int(np.nan_to_num(rows[-1], nan=-np.inf).argmax()))
                part = made[-1:]
        finally:
            seq.close()
            engine.cache.forget()
    return made, np.stack(rows)


def _logits(
    engine: Engine, ids: list[int], made: list[int], progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    """Run the prompt ``ids`` and the tokens ``made`` at once. Return the logits from which each of
    the n tokens ``made`` would be chosen, float64 ``[n, n_vocab]``: by kernels, and by their twins.
    """
    n = len(made)
    whole = [*ids, *made[:-1]]
    with engine.lock:
        seq = new_sequence(engine)
        try:
            ours = engine.run([BatchItem(seq, whole, n)]).astype(np.float64)
        finally:
            seq.close()
            engine.cache.forget()
    key = PlanKey(len(whole), n, "logits")
    theirs = run_by_twins(engine, key, whole, n, "logits", engine.config.n_vocab, progress)
    return ours, theirs


def run_by_twins(
    engine: Engine,
    key: PlanKey,
    ids: list[int],
    n_outputs: int,
    output: str,
    width: int,
    progress: Progress | None,
) -> np.ndarray:
    """Run the twins of the plan of ``key`` on the text ``ids``, with the default adapters and
    control vectors. Return the graph's output ``output``, float64 ``[rows, width]``, with a row for
    each of ``n_outputs`` (at least 1). The cache is left as it was.
    """
    with engine.lock:
        seq = new_sequence(engine)
        try:
            item = BatchItem(seq, ids, n_outputs)
            adapted, steered = engine.needs_of(seq, ids)
            key = key._replace(adapted=adapted, steered=steered)
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
    """Compare an encoder's vector of some random tokens with the twins'; skip the twins if
    ``n_weights`` is above ``most``.
    """
    ids = _random_ids(engine)
    if n_weights > most:
        return TextCheck(tuple(ids), skipped=_too_many(n_weights))
    ours = engine.embed([ids])[0].astype(np.float64)
    key = PlanKey(len(ids), 1, "embedding")
    found = run_by_twins(engine, key, ids, 0, "embedding", len(ours), progress)
    theirs = found[0]
    cosine = float(ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
    problem = ""
    if not cosine >= LEAST_COSINE:
        problem = f"the vector's cosine with the twins' is {cosine:.6f}, expected {LEAST_COSINE}"
    return TextCheck(tuple(ids), apart=1 - cosine, problem=problem)


# -- known texts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownText:
    """Ids of a prompt and of the likeliest tokens after it, by the forward pass in float64 (the one
    of treadle's tests), for the model's file with this size and hash. The logit of each is ahead of
    every other token's by ``lead`` at least.
    """

    n_bytes: int  # of the model's file
    sha256: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    lead: float


# The model inside the package: ``try:\n    import json\nexcept ImportError``, then
# ``:\n    from json import json\n\nfrom``.
PACKAGED = KnownText(
    n_bytes=6_007_552,
    sha256="eb94c3a9006535961122651370a3f4c15d1db54bacef571cde51b528664ab967",
    prompt=(0, 1716, 27, 275, 564, 1035, 84, 268, 200, 2382, 2083),
    ids=(27, 275, 548, 1035, 84, 268, 564, 1035, 84, 268, 200, 200, 652),
    lead=0.6,
)


def known_text(model: Model) -> KnownText | None:
    """Return the known text of a model; None if there is none."""
    path = model.gguf.path
    if not path.is_file() or path.stat().st_size != PACKAGED.n_bytes:
        return None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return PACKAGED if digest == PACKAGED.sha256 else None
