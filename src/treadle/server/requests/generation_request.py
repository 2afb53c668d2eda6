"""Reads generation requests from bodies: the fields that all protocols share.

Each protocol reads its own fields and its prompt; settings, limits and constraints are read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from treadle.api.options import adapter_scales
from treadle.base.fast_classes import dataclass
from treadle.base.validate import is_number
from treadle.chat.media_parts import MARKER
from treadle.chat.tools.answer_plan import AnswerOptions, AnswerPlan, plan_answer
from treadle.chat.tools.detect import TemplateDialect
from treadle.sampling import Sampling
from treadle.scheduler.output import IndentStop
from treadle.scheduler.request import MediaPrompt
from treadle.server.http.api_errors import ApiError, named, too_long
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    mapping,
    number,
    object_of,
    read_fields,
    refused,
    text,
    texts,
    whole,
    wrong,
)
from treadle.server.requests.client_slots import NONE
from treadle.server.requests.request_media import check_vocabulary, multimodal_ids, n_text
from treadle.server.requests.token_rules import TokenRules, read_rules

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.engine import Engine
    from treadle.kvcache.prefix_tree import Lora
    from treadle.scheduler.request import Request

MAX_N = 128  # outputs of one prompt
MAX_PROMPTS = 256  # of one request
LOOK_AHEAD = 64  # unread pieces of a stream before its request pauses
MAX_STOP = 64  # stop strings
SEEDS = 2**64
NEVER_S = 1e6  # keep-alive interval that means none


def _words(name: str, value: Any) -> list[str] | str:
    return value if isinstance(value, str) else texts(name, value)


# ``Sampling`` checks their ranges
_NUMBER = number(-1e300, 1e300)
_WHOLE = whole(-(2**31))
SAMPLERS: Table = {
    "samplers": _words,
    "temperature": _NUMBER,
    "dynatemp_range": _NUMBER,
    "dynatemp_exponent": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "top_n_sigma": _NUMBER,
    "min_keep": _WHOLE,
    "xtc_probability": _NUMBER,
    "xtc_threshold": _NUMBER,
    "repeat_last_n": _WHOLE,
    "repeat_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "dry_multiplier": _NUMBER,
    "dry_base": _NUMBER,
    "dry_allowed_length": _WHOLE,
    "dry_penalty_last_n": _WHOLE,
    "dry_sequence_breakers": texts,
    "mirostat": _WHOLE,
    "mirostat_tau": _NUMBER,
    "mirostat_eta": _NUMBER,
    "adaptive_target": _NUMBER,
    "adaptive_decay": _NUMBER,
    "ignore_eos": flag,
}
"""Fields of ``Sampling``, which have llama.cpp's names."""

SYNONYMS = {
    "typ_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "thinking_budget_tokens": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
    "reasoning_budget_tokens": "reasoning_budget",
}

GUIDED = ("guided_json", "guided_regex")  # vLLM's names of constraints

_ADAPTER: Table = {"id": whole(0), "scale": number(-1e6, 1e6)}
_STRENGTH = number(-1e6, 1e6)
_PROMPT: Table = {"prompt_string": text, "multimodal_data": array}


def adapters(name: str, value: Any) -> dict[int, float]:
    """Return the scales of LoRA adapters by their numbers, from the ``value`` of the field
    ``name``, ``[{"id", "scale"}, ...]``; adapters not named are off. Raises ApiError.
    """
    result: dict[int, float] = {}
    for entry in array(name, value):
        given = read_fields(mapping(name, entry), _ADAPTER)
        if "id" not in given:
            raise wrong(name, entry, "objects with id and scale")
        if given["id"] in result:
            raise ApiError(400, f"{name}: adapter {given['id']} is listed twice", param=name)
        result[given["id"]] = given.get("scale", 0.0)
    return result


def scales_of(given: Mapping[str, Any], engine: Engine) -> Lora:
    """Return pairs of number and scale of the LoRA adapters and control vectors for a request, from
    its fields ``lora`` and ``control_vectors`` in ``given``. A field that is absent means the
    server's defaults. Raises TreadleError.
    """
    return adapter_scales(given.get("lora"), given.get("control_vectors"), engine)


def strengths(name: str, value: Any) -> dict[str, float]:
    """Return the strengths of control vectors by name, from the ``value`` of the field ``name``,
    ``{NAME: STRENGTH}``; vectors not named are off. Raises ApiError.
    """
    given = mapping(name, value)
    return {key: _STRENGTH(f"{name}.{key}", own) for key, own in given.items()}


ANY_OBJECT: Mapping[str, Any] = {"json_schema": {"type": "object"}}
"""A ``response_format`` of type json_object without a schema."""

_OTHER_ENGINES = "not supported: use response_format, json_schema, regex or grammar"


def _choices(name: str, value: Any) -> str:
    """Return a regular expression that matches exactly the strings in ``value``, the field
    ``name``. Raises ApiError unless it is one or several strings.
    """
    found = texts(name, value)
    if not found:
        raise wrong(name, value, "at least one string")
    return "|".join(re.sub(r"([\\.+*?()|\[\]{}^$#&\-~])", r"\\\1", each) for each in found)


STRUCTURED: Table = {
    "json": lambda name, value: value,  # checked when it is compiled
    "regex": text,
    "choice": _choices,
    "grammar": text,
    "json_object": flag,
    "structural_tag": refused(_OTHER_ENGINES),
}
"""vLLM's ``structured_outputs``."""

COMMON: Table = {
    "max_tokens": whole(-1),
    "seed": whole(-(2**63), 2**64 - 1),
    "stop": texts,
    "stream": flag,
    "n": whole(1, MAX_N),
    "logit_bias": lambda name, value: value,
    "response_format": mapping,
    "json_schema": lambda name, value: value,  # checked where it is compiled
    "grammar": text,
    "regex": text,
    "reasoning_budget": whole(-1),
    "reasoning_budget_message": text,
    "reasoning_control": flag,
    "priority": whole(-100, 100),
    "timeout": number(0, 1e6),
    "cache_prompt": flag,
    "user": text,
    "safety_identifier": text,
    "guided_choice": _choices,
    "guided_grammar": refused(_OTHER_ENGINES),
    "structured_outputs": object_of(STRUCTURED),
    "include_stop_str_in_output": flag,
    "use_beam_search": refused("beam search is not supported", False),
    "logits_processors": refused("not supported: set the samplers with fields of the request", []),
    "cache_salt": refused("not supported: all requests share the prefix cache"),
    "sse_ping_interval": number(-1, 1e6),
    "grammar_lazy": refused("not supported: a grammar applies from the first token", False),
    "lora": adapters,
    "control_vectors": strengths,
    "post_sampling_probs": refused(
        "not supported: log-probabilities are those before sampling", False
    ),
    "t_max_predict_ms": whole(-1),
    "n_indent": whole(0),
    "image_data": refused(
        "not supported: send prompt as an object of prompt_string and multimodal_data", []
    ),
}


@dataclass
class GenerationRequest:
    """One generation request, which may have many outputs: ``prompts`` of token ids, ``n`` outputs
    of each, and ``settings``, keyword arguments of ``Model.generate``. ``more``: fields that only
    its protocol reads.
    """

    prompts: list[list[int]]
    settings: dict[str, Any]
    n: int = 1  # outputs of each prompt
    is_streamed: bool = False
    client: str | None = None  # key for fair sharing of prefill
    priority: int = 0  # lower runs first
    timeout_s: float | None = None  # from arrival to the end; None: no limit
    slot: int = NONE  # the preferred slot
    reuse: bool = True  # of cached prefixes
    progress: bool = False  # whether a stream reports prompt progress
    lines: tuple[int, int] = (0, 0)  # indent, and milliseconds: see ``IndentStop``
    more: dict[str, Any] = field(default_factory=dict)
    options: AnswerOptions = field(default_factory=AnswerOptions)  # constraints of the output
    # The compiled constraint and the output's parser.
    planned: AnswerPlan = field(default_factory=AnswerPlan)
    names: dict[str, str] = field(default_factory=dict)  # the client's names of settings, by ours
    rules: TokenRules = field(default_factory=TokenRules)
    keeps_stop: bool = False  # whether the output includes the stop string that ends it
    ping_s: float | None = None  # seconds of silence before a keep-alive; None: the usual
    unlimited: bool = False  # its ``reasoning_budget`` is -1: not even the server's budget holds
    ignored: list[str] = field(default_factory=list)  # warnings about ignored fields
    system_end: int = 0  # number of ids of the system prompt: see ``Request``

    def plan(self, model: Model, dialect: TemplateDialect | None = None, prompt: str = "") -> None:
        """Compile the output constraints into ``planned``. ``prompt``: the rendered prompt.
        ``dialect``: the template's marks of reasoning and calls; None: outputs are plain text.
        Raises GrammarError.
        """
        with named(self.names):
            self.planned = plan_answer(
                self.options, dialect or TemplateDialect(), prompt, model.grammars
            )

    def _limit(self, ids: list[int], model: Model) -> int | None:
        """Return the most tokens to generate after the prompt ``ids``: ``max_tokens``, and no more
        than a KV cache that is smaller than the context has room for. None and -1 mean no limit,
        here and in the result.
        """
        asked: int | None = self.settings["max_tokens"]
        asked = model.defaults.max_tokens if asked is None else asked
        if room(model) == model.n_ctx:
            return asked
        most = room(model) - len(ids)
        return most if asked in (None, -1) else min(asked, most)

    def requests(self, model: Model) -> list[tuple[Request, int]]:
        """Return a scheduler's request for each output, with the index of its prompt. Raises
        TreadleError for invalid settings, ApiError for a prompt after which no token fits.
        """
        sampling: Sampling = self.settings["sampling"]
        result = []
        for at, ids in enumerate(self.prompts):
            if len(ids) >= room(model):  # no token can follow
                raise too_long(len(ids), room(model), room(model) - 1)
            for i in range(self.n):
                own = sampling if sampling.seed is None else _seeded(sampling, i)
                own = self.rules.applied(own, n_text(ids, model))
                settings = {**self.settings, "sampling": own, "max_tokens": self._limit(ids, model)}
                request = model.build_request(
                    ids,
                    **settings,
                    cache_prompt=self.reuse,
                    plan=self.planned,
                    ends=self.rules.stop,
                    keeps_stop=self.keeps_stop,
                    lines=IndentStop(*self.lines) if max(self.lines) > 0 else None,
                    priority=self.priority,
                    client=self.client,
                    look_ahead=LOOK_AHEAD if self.is_streamed else math.inf,
                    system_end=self.system_end,
                )
                result.append((request, at))
        return result


def _seeded(sampling: Sampling, i: int) -> Sampling:
    """Return ``sampling`` with a seed of its own for the i-th output of a prompt: with one seed all
    outputs would be equal.
    """
    assert sampling.seed is not None
    return replace(sampling, seed=(sampling.seed + i) % SEEDS)


def read_generation(body: Mapping[str, Any], model: Model, defaults: Sampling) -> GenerationRequest:
    """Return the request of a body, with all shared fields but the prompts. ``defaults``: sampling
    settings of fields that the body lacks. Raises ApiError; TreadleError for settings out of range.
    """
    body = dict(body)
    names = _structured(body)
    for name, ours in SYNONYMS.items():
        two = name in GUIDED and body.get(name) is not None
        if two and body.get(ours) not in (None, "", body[name]):
            raise conflicting_constraints(name, ours)
        if body.get(name) is not None and (body.get(ours) is None or name.startswith("max_")):
            body[ours] = body[name]
            names[ours] = name
    with named(names):
        generation = _asked(body, model, defaults, names)
    form = body.get("response_format")
    if form is not None:
        own = [key for key in _response_format(form) if body.get(key) in (None, "")]
        names |= dict.fromkeys(own, "response_format")
    generation.names = names
    return generation


def _structured(body: dict[str, Any]) -> dict[str, str]:
    """Replace vLLM's constraint fields in ``body`` by treadle's (``json_schema``, ``regex``, ...),
    in place. Return a mapping from treadle's names to those that the client used.
    """
    made = dict[str, Any]()
    names = dict[str, str]()
    own = {"json": "json_schema", "choice": "regex"}
    given = read_fields(
        body, {name: COMMON[name] for name in ("guided_choice", "structured_outputs")}
    )
    for name, value in given.get("structured_outputs", {}).items():
        if name == "json_object":
            name = "json"
            value = {"type": "object"} if value else None
        if value is not None:
            made[own.get(name, name)] = value
            names[own.get(name, name)] = f"structured_outputs.{name}"
    if "guided_choice" in given:
        if "regex" in made:
            raise conflicting_constraints("guided_choice", names["regex"])
        made["regex"] = given["guided_choice"]
        names["regex"] = "guided_choice"
    for name in made:
        for other in (name, *(each for each, ours in SYNONYMS.items() if ours == name)):
            if body.get(other) is not None:
                raise conflicting_constraints(names[name], other)
    body |= made
    return names


def _asked(
    body: Mapping[str, Any], model: Model, defaults: Sampling, names: Mapping[str, str]
) -> GenerationRequest:
    slots = whole(NONE, model.engine.cache.n_sequences - 1)
    given = read_fields(body, {**COMMON, "id_slot": slots})
    settings: dict[str, Any] = {
        "max_tokens": given.get("max_tokens"),
        "stop": _stop(given.get("stop", [])),
        "sampling": _sampling(body, given, model, defaults),
    }
    for name in ("lora", "control_vectors"):
        if name in given:
            settings[name] = given[name]
    return GenerationRequest(
        [],
        settings,
        n=given.get("n", 1),
        is_streamed=given.get("stream", False),
        client=given.get("safety_identifier", given.get("user")),
        priority=given.get("priority", 0),
        timeout_s=given.get("timeout") or None,
        slot=given.get("id_slot", NONE),
        reuse=given.get("cache_prompt", True),
        lines=(given.get("n_indent", 0), given.get("t_max_predict_ms", 0)),
        options=_options(given, names, model),
        rules=read_rules(body, model),
        keeps_stop=given.get("include_stop_str_in_output", False),
        ping_s=_ping_s(given.get("sse_ping_interval")),
        unlimited=given.get("reasoning_budget", 0) < 0,
    )


def _ping_s(asked: float | None) -> float | None:
    """Return the seconds of silence before a keep-alive, None for the usual number, as ``asked``;
    llama.cpp's -1 and 0 mean never.
    """
    return asked if asked is None or asked > 0 else NEVER_S


def _stop(stop: list[str]) -> list[str]:
    if len(stop) > MAX_STOP:
        raise ApiError(400, f"stop: {len(stop)} strings, at most {MAX_STOP}", param="stop")
    return [word for word in stop if word]


def _sampling(
    body: Mapping[str, Any], given: Mapping[str, Any], model: Model, defaults: Sampling
) -> Sampling:
    fields = read_fields(body, SAMPLERS)
    if "seed" in given:
        fields["seed"] = None if given["seed"] == -1 else given["seed"] % SEEDS
    if "logit_bias" in given:
        fields["logit_bias"] = _bias(given["logit_bias"], model)
    return replace(defaults, **fields)


def _bias(value: Any, model: Model) -> dict[int, float]:
    """Return the logit bias by token id, from ``value``: OpenAI's object, or llama.cpp's pairs of
    token and bias. A string means each of its tokens; false as bias means -inf. Raises ApiError.
    """
    pairs = list(value.items()) if isinstance(value, dict) else array("logit_bias", value)
    result: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise wrong("logit_bias", pair, "pairs of a token and a bias")
        token = pair[0]
        amount = pair[1]
        if amount is False:
            amount = -math.inf
        elif not is_number(amount):
            raise wrong("logit_bias", amount, "a number, or false")
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 12:
            result[int(token)] = amount
        elif isinstance(token, str):
            check_text(token, model)
            result |= {id: amount for id in model.tokenize(token, bos=False)}
        else:
            result[whole(0)("logit_bias", token)] = amount
    return result


def _options(given: Mapping[str, Any], names: Mapping[str, str], model: Model) -> AnswerOptions:
    """Return the constraints and reasoning limits of the output from the body's fields ``given``.
    ``names``: from treadle's field names to the client's. Raises ApiError if two fields contradict
    each other.
    """
    keys = ("grammar", "json_schema", "regex")
    found = {key: given[key] for key in keys if given.get(key, "") != ""}
    form = given.get("response_format")
    lenient = False
    own = {} if form is None else _response_format(form)
    any_object = own == ANY_OBJECT and "json_schema" in found
    if own and not any_object and found and own != found:
        other = next(iter(found))
        raise conflicting_constraints("response_format", names.get(other, other))
    if own and not found:
        lenient = form is not None and form.get("type") == "json_schema" and _is_lenient(form)
        found = own
    if len(found) > 1:
        one, other, *_ = (names.get(key, key) for key in found)
        raise conflicting_constraints(one, other)
    budget = given.get("reasoning_budget", -1)
    return AnswerOptions(
        schema=found.get("json_schema"),
        lenient=lenient,
        grammar=found.get("grammar"),
        regex=found.get("regex"),
        budget=None if budget < 0 else budget,
        message=given.get("reasoning_budget_message", model.defaults.reasoning_budget_message),
        control=given.get("reasoning_control", False),
    )


def conflicting_constraints(one: str, other: str) -> ApiError:
    """Return the error (400) for the fields ``one`` and ``other``, which both constrain the
    answer.
    """
    why = "each constrains the answer: send only one of them"
    return ApiError(400, f"{one} and {other}: {why}", param=one)


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``response_format`` as ``{"grammar" | "json_schema" | "regex": value}``, {} for
    plain text. Raises ApiError.
    """
    kind = form.get("type")
    where = "response_format"
    if kind == "text":
        return {}
    if kind == "json_object" and form.get("schema") is None and form.get("json_schema") is None:
        return dict(ANY_OBJECT)
    if kind in ("json_object", "json_schema"):
        return {"json_schema": _inner_schema(where, form)}
    if kind in ("grammar", "regex"):
        return {kind: text(f"{where}.{kind}", form.get(kind))}
    raise ApiError(
        400,
        f"{where}.type: expected text, json_object, json_schema, grammar or regex, "
        f"found {kind!r:.40}",
        param=where,
    )


def _inner_schema(where: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of ``form``, a ``response_format`` in the field ``where``: its
    ``schema``, or that inside its ``json_schema``. Raises ApiError if both are given and differ.
    """
    if form.get("json_schema") is None:  # Responses has all of it one level up
        return mapping(f"{where}.schema", form.get("schema"))
    inner = mapping(f"{where}.json_schema", form["json_schema"])
    schema = mapping(f"{where}.json_schema.schema", inner.get("schema"))
    if form.get("schema") not in (None, schema):
        raise conflicting_constraints(f"{where}.schema", f"{where}.json_schema.schema")
    return schema


def _is_lenient(form: Mapping[str, Any]) -> bool:
    """Return whether a ``response_format`` has ``strict: false``: parts of the schema that cannot
    be enforced are then left out.
    """
    inner = form.get("json_schema")
    return (form if inner is None else inner).get("strict") is False


# -- prompts --------------------------------------------------------------------------------------


def check_length(ids: list[int], model: Model) -> list[int]:
    """Return ``ids``, unchanged, if they are a prompt that fits the context. Raises ApiError for an
    empty or too long prompt, TreadleError for an id that is not in the vocabulary.
    """
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if len(ids) > room(model):
        raise too_long(len(ids), room(model))
    if not isinstance(ids, MediaPrompt):
        check_vocabulary(ids, model)
    return ids


def room(model: Model) -> int:
    """Return the most tokens of a sequence, prompt and output: the context, or the KV cache if
    smaller.
    """
    return min(model.n_ctx, model.engine.cache.n_tokens)


def several(value: Any) -> list[Any]:
    """Return the list of prompts in ``value``, a body's ``prompt``. A list of strings or of lists
    is several prompts; a list with token ids in it, alone or mixed with strings, is one. Raises
    ApiError.
    """
    if value is None:
        raise ApiError(400, "prompt: required", param="prompt")
    one = not isinstance(value, list) or any(type(item) is int for item in value)
    prompts = [value] if one or not value else value
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompts)}, at most {MAX_PROMPTS}", param="prompt")
    return prompts


def read_prompt(value: Any, model: Model, name: str = "prompt") -> list[int]:
    """Return the token ids of the prompt ``value``: a string, ids, both mixed, or llama.cpp's
    object of ``prompt_string`` and ``multimodal_data``. ``name``: its field, for errors. Raises
    ApiError and TreadleError.
    """
    if isinstance(value, dict) and "prompt_string" in value:
        given = {"prompt_string": "", **read_fields(value, _PROMPT, f"{name}.")}
        words = given["prompt_string"]
        if given.get("multimodal_data") or (MARKER in words and model.media is not None):
            check_text(words, model)
            return check_length(multimodal_ids(value, model, name), model)
        value = words
    if isinstance(value, str):
        check_text(value, model)
        return check_length(model.tokenize(value), model)
    if not isinstance(value, list) or not all(type(item) in (int, str) for item in value):
        raise wrong(name, value, "a string, token ids, or both mixed")
    return check_length(item_ids(value, model), model)


def item_ids(items: list[int | str], model: Model) -> list[int]:
    """Return the token ids of a prompt given as a list of ids and strings. Raises ApiError for a
    string that cannot fit the context.
    """
    ids: list[int] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            check_text(item, model)
            ids += model.tokenize(item, bos=False if i else None)
        else:
            ids.append(item)
    return ids


def check_text(said: str, model: Model) -> None:
    """Raise ApiError if the text ``said`` cannot fit the context with any vocabulary. This is
    checked before it is tokenized, which takes a second for some megabytes. A token of ordinary
    text has about 4 characters, one of blanks up to some hundred.
    """
    if len(said) > most_characters(model):
        raise too_long(len(said) // 512, room(model), at_least=True)


def most_characters(model: Model) -> int:
    """Return the length in characters above which no text fits the context."""
    return 512 * model.n_ctx + 4096
