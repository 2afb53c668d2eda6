"""All settings of the sampler chain, with the names of llama.cpp's server; and those that a model's
files recommend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.validate import as_integer, check_keywords, is_flag, is_number, number_between
from treadle.errors import SamplingError, of_setting

CustomSampler = Callable[[npt.NDArray[np.float32], list[int]], npt.NDArray[Any]]
"""``(logits [n_vocab], ids of all tokens so far) -> logits [n_vocab]``; -inf rules a token out."""

DEFAULT_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
NAMES = (*DEFAULT_ORDER, "infill", "adaptive_p", "custom")
_OTHER_NAMES = {"nucleus": "top_p", "typ": "typ_p", "typical": "typ_p", "typical_p": "typ_p"} | {
    "temp": "temperature"
}
MOST_NAMES = 64  # samplers in an order, and DRY breakers
# Letters of llama.cpp's --sampler-seq, also accepted by its server as a string.
_LETTERS = dict(zip("edskypmxtia", (*DEFAULT_ORDER, "infill", "adaptive_p"), strict=True))


def _ranged(default: float, low: float = -math.inf, high: float = math.inf) -> Any:
    """Return a dataclass field with this default, whose value is checked to be from ``low`` to
    ``high``, both included.
    """
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Names and defaults are those of llama.cpp.

    Raises :class:`~treadle.errors.SamplingError` for a value out of range, a NaN, or an unknown
    sampler.
    """

    seed: int | None = None
    """None or -1: a new seed every time; :attr:`Sampler.seed` tells which."""
    samplers: Sequence[str] | str = DEFAULT_ORDER
    """The stages in order; also as one string, ``"top_k;top_p;temperature"``, or by
    llama.cpp's letters, ``"kpt"``. What is not named does not run. ``adaptive_p`` always acts last,
    ``custom`` where it is named (else first). ``infill`` writes what is sure between two texts."""
    temperature: float = _ranged(0.8)
    """Logits are divided by it; 0 or less is greedy."""
    dynatemp_range: float = _ranged(0.0, 0, 1e6)
    """Above 0: temperature ± this much, low where the model is sure, high where it is not."""
    # Power to which the entropy, as a share of its maximum, is raised to select the temperature.
    dynatemp_exponent: float = _ranged(1.0, 0, 1e6)
    top_k: int = _ranged(40, -(2**31), 2**31 - 1)
    """Keep the k most likely tokens; 0 or less keeps all."""
    top_p: float = _ranged(0.95, 0, 1)
    """Keep the most likely tokens until their probabilities reach p; 1 keeps all."""
    min_p: float = _ranged(0.05, 0, 1)
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    typical_p: float = _ranged(1.0, 0, 1)
    """Keep the tokens whose surprise is nearest the entropy until they reach p; 1 keeps all."""
    top_n_sigma: float = _ranged(-1.0, -math.inf, 1e6)
    """Keep logits within n standard deviations of the best; 0 or less keeps all."""
    min_keep: int = _ranged(0, 0, 2**31 - 1)
    """Top-p, min-p, typical and XTC leave at least this many tokens."""
    xtc_probability: float = _ranged(0.0, 0, 1)
    """How often XTC removes all but the least likely of the tokens above its threshold."""
    xtc_threshold: float = _ranged(0.1, 0, 1)
    """Above 0.5, XTC is off: two tokens cannot both be that likely."""
    repeat_last_n: int = _ranged(64, -1, 2**31 - 1)
    """How many tokens back the three penalties look; 0 none, -1 everything."""
    # Divides positive logits of tokens that were seen, and multiplies their other logits.
    repeat_penalty: float = _ranged(1.0, 1e-6, 1e6)
    frequency_penalty: float = _ranged(0.0)  # subtracted for each time that a token was seen
    presence_penalty: float = _ranged(0.0)  # subtracted once for a token that was seen
    dry_multiplier: float = _ranged(0.0, 0)
    """Above 0: a token that would continue a sequence of L ≥ dry_allowed_length tokens seen before
    loses ``dry_multiplier * dry_base ** (L - dry_allowed_length)``."""
    dry_base: float = _ranged(1.75, 0)
    dry_allowed_length: int = _ranged(2, 0, 2**31 - 1)
    dry_penalty_last_n: int = _ranged(64, -1, 2**31 - 1)
    """How many tokens back DRY looks; 0 none, -1 everything (which llama.cpp dropped in 2026)."""
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    """Text that no repetition reaches across."""
    mirostat: int = _ranged(0, 0, 2)
    """1 or 2: hold the surprise of the text near mirostat_tau bits; only temperature, the logit
    bias and custom samplers then run beside it."""
    mirostat_tau: float = _ranged(5.0, 0, 1e6)  # bits
    mirostat_eta: float = _ranged(0.1, 0, 1e6)  # how fast it corrects the surprise
    adaptive_target: float = _ranged(-1.0, -math.inf, 1)
    """Prefer tokens near this probability; needs "adaptive_p" among the samplers. Below 0: off."""
    adaptive_decay: float = _ranged(0.9, 0, 0.99)
    """How slowly the running average forgets: about 1 / (1 - decay) tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit; -inf forbids the token."""
    ignore_eos: bool = False
    """Forbid every token that would end the text."""
    custom: CustomSampler | Sequence[CustomSampler] | None = None
    """Any callable ``(logits, ids) -> logits``, or several."""

    def __new__(cls, *_: Any, **given: Any) -> Sampling:
        """Return a new object, not yet initialised. Raises TypeError for a name that is no field,
        with the one to use.
        """
        if given and not given.keys() <= cls.__dataclass_fields__.keys():
            check_keywords(cls.__name__, given, cls.__dataclass_fields__, elsewhere)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            if bounds := each.metadata.get("range"):
                check = _integer if isinstance(each.default, int) else _number
                with of_setting(each.name):
                    self._set(each.name, check(each.name, getattr(self, each.name), *bounds))
        for name, read in (
            ("seed", _seed),
            ("samplers", _order),
            ("dry_sequence_breakers", _breakers),
            ("logit_bias", _biases),
            ("ignore_eos", _flag),
            ("custom", _callables),
        ):
            with of_setting(name):
                self._set(name, read(getattr(self, name)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the only place that normalises a frozen field

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always selected."""
        return self.temperature <= 0


def elsewhere() -> dict[str, str]:
    """Return which settings of an answer are no fields of ``Sampling``, for errors."""
    from treadle.base.foreign_keywords import LOAD_SETTINGS

    of_answers = dict.fromkeys(("max_tokens", "stop"), "a setting of generate() and chat()")
    return LOAD_SETTINGS | of_answers


def _number(name: str, value: object, low: float, high: float) -> float:
    if not is_number(value):
        raise SamplingError(f"{name} must be a number, not {value!r}")
    number = number_between(value, low, high)
    if number is None or math.isinf(number):
        raise SamplingError(f"{name} = {value} is out of range (expected {_span(low, high)})")
    return number


def _integer(name: str, value: Any, least: int, most: int) -> int:
    number = as_integer(value)
    if number is None:
        raise SamplingError(f"{name} must be a whole number, not {value!r}")
    if not least <= number <= most:
        raise SamplingError(f"{name} = {number} is out of range (expected {least} to {most})")
    return number


def _flag(value: object) -> bool:
    if not is_flag(value):
        raise SamplingError(f"ignore_eos must be True or False, not {value!r:.40}")
    return bool(value)


def _each(name: str, values: Iterable[str]) -> Iterator[str]:
    try:
        return iter(values)
    except TypeError:
        raise SamplingError(f"{name} must be a list of strings, not {values!r:.40}") from None


def _seed(seed: Any) -> int | None:
    result = None if seed is None else _integer("seed", seed, -1, 2**64 - 1)
    return None if result == -1 else result


def _span(low: float, high: float) -> str:
    if math.isinf(high):
        return "a finite number" if math.isinf(low) else f"{low:g} or more"
    return f"{high:g} or less" if math.isinf(low) else f"{low:g} to {high:g}"


def _named(given: str) -> str:
    name = given.lower().replace("-", "_")
    return _OTHER_NAMES.get(name, name)


def _order(names: Sequence[str] | str) -> tuple[str, ...]:
    if isinstance(names, str):
        names = [name.strip() for name in names.split(";") if name.strip()]
        if len(names) == 1 and _named(names[0]) not in NAMES and set(names[0]) <= _LETTERS.keys():
            names = [_LETTERS[letter] for letter in names[0]]
    order = []
    for given in _each("samplers", names):
        name = _named(given) if isinstance(given, str) else ""
        if name not in NAMES:
            raise SamplingError(f"no sampler {given!r} (expected one of {', '.join(NAMES)})")
        order.append(name)
        _check_many("samplers", order)
    return tuple(order)


def _breakers(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise SamplingError("dry_sequence_breakers must be a list of strings, not a string")
    texts = tuple(_each("dry_sequence_breakers", texts))
    _check_many("dry_sequence_breakers", texts)
    for text in texts:
        if not isinstance(text, str) or not 1 <= _n_bytes(text) <= 40:
            raise SamplingError(f"a DRY sequence breaker must be 1 to 40 bytes of text: {text!r}")
    return texts


def _check_many(name: str, given: Sequence[str]) -> None:
    """Raise SamplingError for more than MOST_NAMES entries: a sampler costs time per token, a
    breaker per vocabulary entry.
    """
    if len(given) > MOST_NAMES:
        raise SamplingError(f"{name}: expected at most {MOST_NAMES} entries")


def _n_bytes(text: str) -> int:
    """Return the length in UTF-8; 0 if it cannot be encoded, such as half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _biases(biases: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise SamplingError(f"logit_bias must map token ids to numbers, not {biases!r}")
    checked = {}
    for token, bias in biases.items():
        token = _integer("a token id in logit_bias", token, 0, 2**31 - 1)
        name = f"the logit_bias of token {token}"
        checked[token] = -math.inf if bias == -math.inf else _number(name, bias, -1e30, 1e30)
    return checked


def _callables(custom: CustomSampler | Sequence[CustomSampler] | None) -> tuple[CustomSampler, ...]:
    if custom is None:
        return ()
    several = tuple(custom) if isinstance(custom, Sequence) else (custom,)
    for one in several:
        if not callable(one):
            raise SamplingError(f"a custom sampler must be callable: {one!r}")
    return several


# Keys after "general.sampling.", by field.
KEYS = {
    "temperature": "temp",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
# Names in Hugging Face's generation_config.json that differ from the fields'.
_HF_NAMES = {"repeat_penalty": "repetition_penalty"}


def read_generation_config(said: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``said``, the contents of a generation_config.json, to GGUF's keys
    ``general.sampling.*`` for the settings it recommends; empty if it sets ``do_sample`` to false.
    Values out of range are dropped.
    """
    if said.get("do_sample") is False:
        return {}
    found = _within_range({name: said.get(_HF_NAMES.get(name, name)) for name in KEYS})
    return {f"general.sampling.{KEYS[name]}": value for name, value in found.items()}


def recommended(metadata: Mapping[str, Any]) -> Sampling:
    """Return the settings in a GGUF's ``metadata`` (``general.sampling.*``), and llama.cpp's values
    for the rest. Values out of range are dropped, so that a file cannot make every answer fail.
    """
    said = {name: metadata.get(f"general.sampling.{key}") for name, key in KEYS.items()}
    return Sampling(**_within_range(said))


def _within_range(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by field of `Sampling`, that are numbers and that it accepts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            with suppress(SamplingError):
                given: dict[str, Any] = {name: value}
                found[name] = getattr(Sampling(**given), name)
    return found
