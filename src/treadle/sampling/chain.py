"""The sampler chain: its stages and their order, over the logits of one sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from treadle.engine.logits import AsyncMask, LogitsQuery
from treadle.errors import NotFiniteError, SamplingError, TreadleError, of_setting
from treadle.sampling.best import BestCandidates, best_of, top_stages
from treadle.sampling.candidates import Candidates, Floats, dynamic_temperature, temperature
from treadle.sampling.selection import AdaptiveP, Dist, Greedy, Mirostat, Selector, Uniforms
from treadle.sampling.settings import CustomSampler, Sampling
from treadle.sampling.truncation import infill, min_p, top_k, top_n_sigma, top_p, typical, xtc

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsRow
    from treadle.sampling.repetition import Breakers, Vocabulary


class TokenConstraint(Protocol):
    """A grammar or other constraint on the next token."""

    def mask(self, logits: Floats, /) -> npt.NDArray[np.float32] | None:
        """Set -inf for tokens that cannot follow: in ``logits`` [n_vocab], then return None, or in
        a returned array.

        A constraint with ``start_bits()`` is applied while the model runs: it returns a
        ``AsyncMask`` with one bit per token, lowest first, set if the token may follow; if none is
        set, ``mask`` is called for the reason. A constraint with ``forced()`` returns the ids that
        must come next, if known: they are drafted, and sampled like any other. One with
        ``unbound()`` tells whether any token may come next, so that ``mask`` need not be called.
        """

    def accept(self, id: int, /) -> object:
        """Advance past the sampled token."""


class Sampler:
    """Samples the tokens of one sequence.

    ``settings``: for a vocabulary of ``n_vocab`` tokens. ``eog``: the ids that end a text
    (forbidden by ignore_eos). ``tokenizer``: needed only by DRY, for its sequence breakers, and by
    infill. ``constraint``: masks the logits before each choice, and gets the sampled token
    (``accept``) after it.

    ``sample`` takes a whole row of logits. ``choose`` takes an engine's row, and usually needs only
    its largest logits, which ``query`` has asked for before the run.

    The order: custom samplers (unless ``custom`` is among the stages), logit bias, constraint, the
    stages of ``settings.samplers``, the selection. Raises SamplingError for settings that do not
    fit the vocabulary, and for a constraint without ``mask`` or ``accept``.
    """

    def __init__(
        self,
        settings: Sampling,
        n_vocab: int,
        *,
        eog: Collection[int] = (),
        tokenizer: Vocabulary | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        _check_constraint(constraint)
        self.settings = settings
        self.n_vocab = n_vocab
        self._constraint = constraint
        self._tokenizer, self._eog = tokenizer, frozenset(eog)
        self._bias = _bias(settings, n_vocab, eog)
        self._custom = tuple(settings.custom or ())  # type: ignore[arg-type]
        self._stages = _plan(settings, self)
        self._top_stages = top_stages(settings, [name for name, _ in self._stages], n_vocab)
        self._boosted = np.zeros(0, np.intp)
        if self._bias is not None:
            self._boosted = self._bias[0][self._bias[1] > 0]
            if constraint is not None and len(self._boosted):  # unknown which of them it rules out
                self._top_stages = None
        self._start_mask: Callable[[], AsyncMask] | None = getattr(constraint, "start_bits", None)
        self._forced: Callable[[], list[int]] | None = getattr(constraint, "forced", None)
        self._unbound: Callable[[], bool] | None = getattr(constraint, "unbound", None)
        self._has_query = False
        self.reset()
        names = [name for name, _ in self._stages]
        bare = not len(self._boosted)
        self._argmax_only = bare and not names and settings.greedy  # the largest logit is the token
        # number of tokens that stay
        self._n_first_top_k = settings.top_k if bare and names[:1] == ["top_k"] else 0
        # Lowering others does not change which of the rest are largest.
        self._biased_ids = frozenset(() if self._bias is None else self._bias[0].tolist())
        needs_total = "top_p" in names[: len(self._top_stages or ())]
        self._default_query = LogitsQuery(
            None, self._argmax_only and not self._biased_ids, needs_total
        )

    def reset(self) -> None:
        """Reset the state: seed, mirostat and adaptive-p start over."""
        self.ended = False  # the grammar is complete, and no token may follow, not even its end
        self._uniforms = Uniforms(self.settings.seed)
        self._select = _selector(self.settings, self.n_vocab)

    @property
    def seed(self) -> int:
        """The seed in use; pass it to Sampling to reproduce the output."""
        return self._uniforms.seed

    @property
    def chain(self) -> tuple[str, ...]:
        """The names of the active stages, in order; a stage whose setting disables it is absent."""
        first = ["custom"] * (bool(self._custom) and "custom" not in self.settings.samplers)
        first += ["logit_bias"] * (self._bias is not None)
        first += ["constraint"] * (self._constraint is not None)
        last = type(self._select).__name__.lower()
        return (*first, *(name for name, _ in self._stages), last)

    def sample(self, logits: npt.NDArray[np.floating[Any]], ids: list[int]) -> int:
        """Sample the next token id from ``logits`` [n_vocab] (unchanged) after the tokens ``ids``.

        ``ids`` are all tokens so far, the prompt included, for the penalties. Raises SamplingError
        for logits of the wrong shape, and if every token is ruled out (``ended``: after a complete
        text of the grammar); NotFiniteError for NaN or +inf among them, or only -inf.
        """
        return self._finish(Candidates(self._prepare(logits, ids)), ids, 0)

    @property
    def constraint(self) -> TokenConstraint | None:
        """The constraint on the next token; None without one."""
        return self._constraint

    def forced(self) -> list[int]:
        """Return the ids that the constraint forces next; [] if none are known, or without a
        constraint. Call it before ``query``.
        """
        return self._forced() if self._forced is not None else []

    def query(self, n_rows: int = 1) -> LogitsQuery | None:
        """Return the query for the largest logits of the next ``n_rows`` rows, one for each token
        to sample; None to get whole rows.
        """
        self._has_query = self._top_stages is not None
        if not self._has_query or self._constraint is None:
            return self._default_query if self._has_query else None
        if self._start_mask is not None and n_rows == 1:  # a mask is for one position
            return self._default_query._replace(mask=self._start_mask())
        if self._unbound is not None and n_rows == 1 and self._unbound():
            return self._default_query
        self._has_query = False
        return None

    def choose(self, row: LogitsRow, ids: list[int]) -> int:
        """Sample from an engine's row as ``sample`` does, using only its largest logits if they
        decide. ``ids``: all tokens so far, for the penalties.
        """
        top = row.top if self._has_query else None
        if top is None:
            return self.sample(row.logits(), ids)
        highest, token = top.first
        if not -math.inf < highest < math.inf:  # the whole row gives the error
            return self.sample(row.logits(), ids)
        if self._argmax_only and token not in self._biased_ids:
            if self._constraint is not None:
                self._constraint.accept(token)
            return token
        head = self._n_first_top_k
        if head and (values := top.values)[head - 1] > -math.inf:
            few = top.ids[:head].astype(np.intp)
            if not self._biased_ids or self._biased_ids.isdisjoint(few.tolist()):
                return self._finish(Candidates(values[:head], few, descending=True), ids, 1)
        found = self._sample_top(best_of(row, top, self._boosted), ids)
        return self.sample(row.logits(), ids) if found is None else found

    def _sample_top(self, best: BestCandidates, ids: list[int]) -> int | None:
        """Return the next token if ``best``, a few of the largest logits, decides it; None if the
        whole row is needed. ``ids``: all tokens so far, for the penalties.
        """
        assert self._top_stages is not None
        if self._bias is not None:
            best = best.biased(*self._bias)
            if not -math.inf < best.c.peak < math.inf:
                return None
        for at, opening in enumerate(self._top_stages):
            made = opening(best, self._stages[at][1], ids)
            if made is None:
                return None
            if isinstance(made, Candidates):
                return self._finish(made, ids, at + 1)
            best = made
        return self._finish(best.c, ids, len(self._top_stages)) if best.n_sure else None

    def _finish(self, c: Candidates, ids: list[int], at: int) -> int:
        """Run the stages from index ``at`` on over the candidates ``c``, select a token, and
        advance the constraint past it. ``ids``: all tokens so far.
        """
        for _, stage in self._stages[at:]:
            c = stage(c, ids, self._uniforms)
        token = self._select(c, ids, self._uniforms)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def _prepare(self, logits: npt.NDArray[np.floating[Any]], ids: list[int]) -> Floats:
        x = _checked(logits, self.n_vocab, "the model's logits", NotFiniteError)
        if "custom" not in self.settings.samplers:
            for custom in self._custom:
                x = _checked(custom(x.copy(), ids), self.n_vocab, _name(custom))
        if self._bias is not None:
            tokens, amounts = self._bias
            x = x.copy()
            x[tokens] += amounts
            x = _checked(x, self.n_vocab, "the logits after logit_bias")
        if self._constraint is not None:
            masked = x.copy()
            answer = self._constraint.mask(masked)
            if answer is not None:
                masked = answer
            whole = getattr(self._constraint, "accepting", False)
            self.ended = bool(whole and np.max(masked) == -np.inf)
            x = _checked(masked, self.n_vocab, "the grammar's mask")
        return x

    def _run_custom(self, c: Candidates, ids: list[int]) -> Candidates:
        """Run the custom samplers as a stage of the chain, on a row of all tokens' logits; tokens
        that earlier stages ruled out stay so. ``ids``: all tokens so far.
        """
        for custom in self._custom:
            x = np.full(self.n_vocab, -np.inf, np.float32)
            at = slice(None) if c.ids is None else c.ids
            x[at] = c.logits
            new = _checked(custom(x, ids), self.n_vocab, _name(custom))[at]
            c = Candidates(np.where(c.logits == -np.inf, c.logits, new), c.ids)
        return c

    def _breakers(self) -> Breakers:
        texts = self.settings.dry_sequence_breakers
        if not texts:
            return {}
        if self._tokenizer is None:
            raise SamplingError("DRY needs the tokenizer, to find its sequence breakers")
        from treadle.sampling.repetition import find_breakers

        return find_breakers(self._tokenizer, texts)


def _check_constraint(given: object) -> None:
    """Raise SamplingError for a constraint that is not an object with ``mask`` and ``accept``,
    before any token is generated. None is no constraint.
    """
    asked = (getattr(given, name, None) for name in ("mask", "accept"))
    if given is not None and (isinstance(given, type) or not all(map(callable, asked))):
        raise SamplingError(
            f"constraint: expected an object with mask and accept, found {given!r:.60}"
        )


def _checked(
    values: npt.NDArray[Any],
    n_vocab: int,
    source: str,
    no_number: type[TreadleError] = SamplingError,
) -> Floats:
    """Return ``values`` as float32 [n_vocab]. One pass finds NaN, +inf or only -inf, for which it
    raises ``no_number``; it raises SamplingError for another shape or type. Messages begin with
    ``source``.
    """
    x = np.asarray(values)
    if x.shape != (n_vocab,) or x.dtype.kind not in "fiu":
        raise SamplingError(
            f"{source}: expected {n_vocab} real numbers, found {x.dtype} of shape {x.shape}"
        )
    if x.dtype != np.float32:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    at = int(x.argmax())  # the first NaN, if any
    peak = float(x[at])
    if math.isnan(peak):
        raise no_number(f"{source}: NaN at token {at}")
    if peak == math.inf:
        raise no_number(f"{source}: +inf at token {at}")
    if peak == -math.inf:
        raise no_number(f"{source}: every token is ruled out")
    return x


def _name(custom: CustomSampler) -> str:
    return f"the custom sampler {getattr(custom, '__name__', type(custom).__name__)}"


def _bias(
    s: Sampling, n_vocab: int, eog: Collection[int]
) -> tuple[npt.NDArray[np.intp], Floats] | None:
    biases = dict(s.logit_bias) | dict.fromkeys(eog if s.ignore_eos else (), -math.inf)
    with of_setting("logit_bias"):
        for token in biases:
            if not 0 <= token < n_vocab:
                raise SamplingError(
                    f"logit_bias: token {token} is outside the vocabulary of {n_vocab}"
                )
    if not biases:
        return None
    tokens = sorted(biases)
    return np.array(tokens, np.intp), np.array([biases[token] for token in tokens], np.float32)


# --- stages: built from the settings, or None if disabled

Stage = Callable[[Candidates, list[int], Uniforms], Candidates]


def _tail(ids: list[int], n: int) -> list[int]:
    return ids if n < 0 else ids[-n:]


def _penalties(s: Sampling, sampler: Sampler) -> Stage | None:
    amounts = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
    if s.repeat_last_n == 0 or amounts == (1, 0, 0):
        return None
    from treadle.sampling.repetition import penalties  # off by default

    return lambda c, ids, u: penalties(c, _tail(ids, s.repeat_last_n), *amounts)


def _dry(s: Sampling, sampler: Sampler) -> Stage | None:
    if s.dry_multiplier == 0 or s.dry_base < 1 or s.dry_penalty_last_n == 0:
        return None
    knobs = (s.dry_multiplier, s.dry_base, s.dry_allowed_length, sampler._breakers())
    from treadle.sampling.repetition import dry  # off by default

    return lambda c, ids, u: dry(c, _tail(ids, s.dry_penalty_last_n), *knobs)


def _xtc(s: Sampling, sampler: Sampler) -> Stage | None:
    if s.xtc_probability == 0 or s.xtc_threshold > 0.5:
        return None

    def stage(c: Candidates, ids: list[int], u: Uniforms) -> Candidates:
        if len(c.logits) < 2 or u.next() > s.xtc_probability:
            return c
        return xtc(c, s.xtc_threshold, s.min_keep)

    return stage


def _infill(s: Sampling, sampler: Sampler) -> Stage:
    vocabulary = sampler._tokenizer
    eog = sampler._eog
    if vocabulary is None:
        raise SamplingError("infill needs the tokenizer, to compare the texts of tokens")
    free = not s.ignore_eos and sampler._constraint is None  # else the end may be ruled out
    end = min(eog, default=None) if free else None
    return lambda c, ids, u: infill(c, vocabulary.token_bytes, eog, end)


def _temperature(s: Sampling, sampler: Sampler) -> Stage | None:
    if s.dynatemp_range > 0 and not s.mirostat:
        knobs = (s.temperature, s.dynatemp_range, s.dynatemp_exponent)
        return lambda c, ids, u: dynamic_temperature(c, *knobs)
    return None if s.temperature == 1 else lambda c, ids, u: temperature(c, s.temperature)


_STAGES: dict[str, Callable[[Sampling, Sampler], Stage | None]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda s, _: (
        None if s.top_n_sigma <= 0 else lambda c, ids, u: top_n_sigma(c, s.top_n_sigma)
    ),
    "top_k": lambda s, _: None if s.top_k <= 0 else lambda c, ids, u: top_k(c, s.top_k),
    "typ_p": lambda s, _: (
        None if s.typical_p >= 1 else lambda c, ids, u: typical(c, s.typical_p, s.min_keep)
    ),
    "top_p": lambda s, _: None if s.top_p >= 1 else lambda c, ids, u: top_p(c, s.top_p, s.min_keep),
    "min_p": lambda s, _: None if s.min_p <= 0 else lambda c, ids, u: min_p(c, s.min_p, s.min_keep),
    "xtc": _xtc,
    "infill": _infill,
    "temperature": _temperature,
    "custom": lambda s, sampler: (
        None if not s.custom else lambda c, ids, u: sampler._run_custom(c, ids)
    ),
    "adaptive_p": lambda s, _: None,  # runs as the selection: see _selector
}
_KEEP_THE_BEST = {"top_n_sigma", "top_k", "top_p", "min_p"}


def _plan(s: Sampling, sampler: Sampler) -> list[tuple[str, Stage]]:
    names = tuple(s.samplers)
    if s.mirostat:
        names = (*(["custom"] if "custom" in names else []), "temperature")
    if s.greedy:  # temperature leaves one token, so later stages have no effect
        names = names[: names.index("temperature")] if "temperature" in names else names
    stages = [(name, stage) for name in names if (stage := _STAGES[name](s, sampler))]
    while s.greedy and stages and stages[-1][0] in _KEEP_THE_BEST:
        stages.pop()  # they always keep the argmax
    return stages


def _selector(s: Sampling, n_vocab: int) -> Selector:
    if s.greedy:
        return Greedy()
    if s.mirostat:
        return Mirostat(s.mirostat, s.mirostat_tau, s.mirostat_eta, n_vocab)
    if "adaptive_p" in s.samplers:
        return AdaptiveP(s.adaptive_target, s.adaptive_decay)
    return Dist()
