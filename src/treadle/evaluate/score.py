"""Scores of logits: surprise at the true token, and divergence between two predictions.

All sums are in float64; exponentials in float32, after subtracting the largest logit. So values are
accurate to about 1e-7, and comparing logits with themselves gives exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass

TASK_LOGITS = 1 << 18  # logits per task of a thread
FLOOR = -16.0  # saved log-probabilities at this floor only mean "less than this"

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of each prediction and of a reference's, float64 ``[n]`` (``same_top``: bool)."""

    nll: Doubles  # -ln p(true token)
    base_nll: Doubles  # the reference's
    kl: Doubles  # KL(reference || model), nats
    same_top: npt.NDArray[np.bool_]  # whether both have the same likeliest token

    @staticmethod
    def join(parts: list[Comparison]) -> Comparison:
        """Concatenate the arrays of several comparisons."""
        return Comparison(
            *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Comparison))
        )


def surprise(logits: Floats, targets: npt.NDArray[np.int32], pool: Executor) -> Doubles:
    """Return ``-ln softmax(logits)[target]`` of each row, f64 ``[n]``. ``logits``: ``[n,
    n_vocab]``; ``targets``: ``[n]``; ``pool``: threads, each with a strip of rows.
    """

    def strip(begin: int, end: int) -> Doubles:
        z = logits[begin:end]
        return normalizer(z) - _pick(z, targets[begin:end])

    return np.concatenate(_in_strips(strip, logits.shape, pool))


def compare(
    logits: Floats, base: Floats, targets: npt.NDArray[np.int32], pool: Executor, *, cut_off: bool
) -> Comparison:
    """Compare the predictions ``logits`` with a reference's, ``base``, row by row. ``targets``: the
    true tokens ``[n]``; ``pool``: threads, each with a strip of rows.

    ``base`` holds logits or, if ``cut_off``, log-probabilities that end at a floor: those at or
    below FLOOR are left out of the divergence, as in llama.cpp's program.
    """

    def strip(begin: int, end: int) -> Comparison:
        q = logits[begin:end]
        p = base[begin:end]
        true = targets[begin:end]
        q_norm = normalizer(q)
        top = np.zeros(len(p), np.float32) if cut_off else p.max(-1)
        share = np.exp(p - top[:, None])  # probabilities, up to a factor
        if cut_off:
            share[p <= FLOOR] = 0.0
        total = share.sum(-1, dtype=np.float64)
        p_norm = np.zeros(len(p)) if cut_off else top + np.log(total)
        mass = total if cut_off else np.ones(len(p))
        # sum p (ln p - ln q), where ln p - ln q = (p's logit - q's) - (p's norm - q's): the
        # difference of similar logits is exact, so no precision is lost if the two are close.
        cross = np.einsum("ij,ij->i", share, p - q, dtype=np.float64) * (mass / total)
        return Comparison(
            nll=q_norm - _pick(q, true),
            base_nll=p_norm - _pick(p, true),
            kl=cross - (p_norm - q_norm) * mass,
            same_top=q.argmax(-1) == p.argmax(-1),
        )

    return Comparison.join(_in_strips(strip, logits.shape, pool))


def _in_strips(
    work: Callable[[int, int], Comparison] | Callable[[int, int], Doubles],
    shape: tuple[int, ...],
    pool: Executor,
) -> list:  # type: ignore[type-arg]
    step = max(1, TASK_LOGITS // shape[1])
    begins = range(0, shape[0], step)
    return list(pool.map(work, begins, [min(b + step, shape[0]) for b in begins]))


def normalizer(z: Floats) -> Doubles:
    """Return ``ln sum exp z`` of each row of logits ``z [n, n_vocab]``, f64 ``[n]``."""
    top = z.max(-1)
    total = np.exp(z - top[:, None]).sum(-1, dtype=np.float64)
    return np.asarray(top + np.log(total))


def _pick(z: Floats, at: npt.NDArray[np.int32]) -> Doubles:
    return np.take_along_axis(z, at[:, None].astype(np.int64), 1)[:, 0].astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g}"


@dataclass(frozen=True)
class Summary:
    """Summary of ``n`` scored predictions. Without a reference, only ``perplexity`` is set."""

    n: int
    perplexity: Estimate  # exp of the mean surprise
    base_perplexity: Estimate | None = None
    ratio: Estimate | None = None  # of the perplexities
    kl: Estimate | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    top1: Estimate | None = None  # share of predictions with the same likeliest token
    delta_p: Estimate | None = None  # mean change of the true token's probability
    delta_p_rms: float | None = None


def summarize(nll: Doubles, comparison: Comparison | None = None) -> Summary:
    """Compute the means, standard errors and percentiles of ``nll``, and of ``comparison`` if
    given.
    """
    if comparison is None:
        return Summary(len(nll), _exp(_mean(nll)))
    c = comparison
    delta = np.exp(-c.nll) - np.exp(-c.base_nll)
    p50, p99, p999 = np.quantile(c.kl, (0.5, 0.99, 0.999))
    return Summary(
        n=len(c.nll),
        perplexity=_exp(_mean(c.nll)),
        base_perplexity=_exp(_mean(c.base_nll)),
        ratio=_exp(_mean(c.nll - c.base_nll)),  # paired: far less noise than each alone
        kl=_mean(c.kl),
        kl_median=float(p50),
        kl_p99=float(p99),
        kl_p999=float(p999),
        kl_max=float(c.kl.max()),
        top1=_mean(c.same_top.astype(np.float64)),
        delta_p=_mean(delta),
        delta_p_rms=float(np.sqrt(np.mean(delta**2))),
    )


def _mean(x: Doubles) -> Estimate:
    error = float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else 0.0
    return Estimate(float(x.mean()), error)


def _exp(log: Estimate) -> Estimate:
    """Return exp of the estimate ``log``, with the error times the derivative."""
    with np.errstate(over="ignore"):
        value = float(np.exp(log.value))
    return Estimate(value, value * log.error)
