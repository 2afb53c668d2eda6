"""Rewrites JSON schemas into stricter ones that ``llguidance`` enforces.

White space between two tokens is limited as in llama.cpp's grammars: a space, or a line break and
its indentation. Otherwise a model may write white space until the length limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

from treadle.errors import GrammarError
from treadle.grammar.json_numbers import dump
from treadle.grammar.llguidance_limits import (
    COUNTS,
    MAX_DEPTH,
    Numbers,
    ReferencedSchemas,
    move_exclusive,
    within,
    without_nul,
)
from treadle.grammar.schema_closed import MAPS, VALUES, ClosedObjects, without_property_names
from treadle.grammar.schema_impossible import ImpossibleParts

MAX_BYTES = 1 << 20  # llguidance takes far less, and 25 s to refuse 5 MiB
WHITESPACE = r" |\n[ \t]{0,20}"

_LEAP = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"  # 4, 100, 400
)
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
# No second 60: minutes that have one are not known in advance. Nine digits of a second are
# nanoseconds; without a limit a model could write digits for ever.
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_N = "[0-9]{1,6}"  # limited: a model could write digits for ever
_SPAN = f"(?:{_N}D|{_N}M(?:{_N}D)?|[0-9]{{1,4}}Y(?:{_N}M(?:{_N}D)?)?)"  # RFC 3339's appendix
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

# Formats for which llguidance's regular expression accepts too much: values must match all of
# these.
FORMATS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "duration": (f"^P(?:{_SPAN}(?:{_HOURS})?|{_HOURS}|{_N}W)$",),
    "email": (f"^{_ATOM}(?:\\.{_ATOM})*@{_LABEL}(?:\\.{_LABEL})*$", "^[^@]{1,64}@.{1,253}$"),
    "hostname": (f"^{_LABEL}(?:\\.{_LABEL})*$", "^.{1,253}$"),
}


@runtime_checkable
class HasSchema(Protocol):
    """An object that provides a JSON schema, such as a pydantic class."""

    def model_json_schema(self) -> Any:
        """Return the schema as a JSON object."""


Schema = str | Mapping[str, Any] | bool | HasSchema


def schema_source(schema: Schema, *, lenient: bool = False) -> tuple[str, tuple[str, ...]]:
    """Return llguidance's grammar of a schema (text, a parsed object, or a pydantic class), and
    messages about the parts left out. ``lenient``: parts that cannot be enforced are left out;
    keywords that llguidance lacks too, with its own warning.

    Raises GrammarError for invalid JSON and, unless ``lenient``, for parts that cannot be enforced.
    """
    from llguidance import LLMatcher

    value, left_out = kept_schema(schema) if lenient else (_enforced(_value(schema)), ())
    try:
        return str(LLMatcher.grammar_from_json_schema(_source(value, lenient))), left_out
    except ValueError as e:
        raise GrammarError(f"JSON schema: {e}") from None


def inline_schema(schema: Schema, *, lenient: bool = False) -> str:
    """Return a schema as a rule body in llguidance's notation (``%json {...}``). ``lenient``:
    llguidance only warns of keywords that it lacks. Raises GrammarError for a schema that is
    invalid or has other parts that cannot be enforced.
    """
    return f"%json {_source(_enforced(_value(schema)), lenient)}"


def is_possible(schema: Schema) -> bool:
    """Whether any value satisfies a schema, as far as llguidance knows. Raises GrammarError for an
    invalid schema.
    """
    from llguidance import LLMatcher

    source, _ = schema_source(schema, lenient=True)
    return "Unsatisfiable" not in LLMatcher.validate_grammar(source)


def _source(value: Any, lenient: bool) -> str:
    """Return the JSON of a schema with llguidance's options, such as ``lenient``, in it. llguidance
    could add these itself, but would then write the schema again and read its numbers twice.
    """
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}
    return dump({**options, **value} if value is not False else False)


def schema_text(schema: Schema) -> str:
    """Return a schema as JSON text. Raises GrammarError for one that is invalid or too large."""
    return json.dumps(_value(schema))


def enforced_schema(schema: Schema) -> Any:
    """Return a schema rewritten for llguidance: closed objects, formats as patterns, exact bounds.
    Raises GrammarError for parts that cannot be enforced.
    """
    return _enforced(_value(schema))


def kept_schema(schema: Schema) -> tuple[Any, tuple[str, ...]]:
    """Return a schema rewritten as by ``enforced_schema``, but without the keywords that cannot be
    enforced, and messages about these. Raises GrammarError for an invalid schema.
    """
    left_out: list[str] = []
    return _enforced(_value(schema), left_out), tuple(dict.fromkeys(left_out))


def _value(schema: Schema) -> dict[str, Any] | Literal[False]:
    """Return a schema as a dict, or False, the schema that allows nothing. Raises GrammarError for
    text or objects that are no schema.
    """
    if isinstance(schema, HasSchema):
        try:
            schema = schema.model_json_schema()
        except Exception as e:  # any error of that library: its class has no schema
            raise GrammarError(f"JSON schema: {type(e).__name__}: {e}") from e
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise GrammarError(
                "JSON schema: expected a JSON object, its text, or a class with "
                f"model_json_schema, not {value!r:.80}"
            )
        if isinstance(value, bool):
            return {} if value else False
        if (n := len(json.dumps(result := dict(value)))) > MAX_BYTES:
            what = f"too large: {n} bytes of JSON (at most {MAX_BYTES})"
            raise GrammarError(f"JSON schema: {what}")
        return result
    except (TypeError, ValueError, RecursionError) as e:
        raise GrammarError(f"JSON schema: {e}") from None


def _enforced(value: dict[str, Any] | Literal[False], left_out: list[str] | None = None) -> Any:
    try:
        return value and _EnforcedSchema(value, left_out).schema(value)
    except RecursionError as e:
        raise GrammarError(f"JSON schema: {e}") from None


class _EnforcedSchema:
    """Rewriter of one schema: FORMATS become patterns, objects are closed, bounds become exact. A
    keyword that cannot be enforced raises GrammarError, or, with ``left_out``, is dropped with a
    message there.
    """

    def __init__(self, root: Mapping[str, Any], left_out: list[str] | None) -> None:
        self._left_out = left_out
        self._parts = ReferencedSchemas(root)
        self._numbers = Numbers()
        self._path: list[str] = []  # of the current part, from the root
        if (depth := self._parts.depth()) > MAX_DEPTH:
            raise GrammarError(
                f"JSON schema: too deeply nested: {depth} levels after following references (at "
                f"most {MAX_DEPTH})"
            )
        self._closed, self._never = ClosedObjects(root, self._parts), ImpossibleParts(self._parts)

    def schema(self, schema: Any, *, is_map: bool = False) -> Any:
        """Return a part of the schema, rewritten. ``is_map``: its keys are names of properties or
        definitions, not keywords.
        """
        if isinstance(schema, list | tuple):
            return [self._inner(str(i), item) for i, item in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        if is_map:
            return {name: self._inner(str(name), item) for name, item in schema.items()}
        if isinstance(schema.get("$ref"), str) and self._never.at(schema["$ref"]):
            return False
        told = without_property_names(schema, self._parts)
        kept = {key: value for key, value in told.items() if self._keeps(key, value)}
        patterns = kept.get("patternProperties")
        if isinstance(patterns, Mapping):
            kept["patternProperties"] = fine = {
                without_nul(pattern): value
                for pattern, value in patterns.items()
                if self._keeps("pattern", pattern, "patternProperties")
            }
            if len(fine) < len(patterns):  # it would forbid names that the dropped patterns allow
                kept.pop("additionalProperties", None)
        found = {
            key: value if key in VALUES else self._part(key, value, kept.get("type"))
            for key, value in kept.items()
        }
        if isinstance(found.get("pattern"), str):
            found["pattern"] = without_nul(found["pattern"])
        move_exclusive(found)
        if self._closed.has(schema):
            found["additionalProperties"] = False
        name = found.get("format")
        if isinstance(name, str) and name in FORMATS:
            del found["format"]
            others = found.get("allOf", [])
            if not isinstance(others, list):
                raise GrammarError(
                    f"JSON schema: allOf is {others!r:.80}: expected a list of schemas"
                )
            found["allOf"] = [*others, *({"pattern": pattern} for pattern in FORMATS[name])]
        return found

    def _part(self, key: str, value: Any, kind: Any) -> Any:
        """Return the value of the keyword ``key``, rewritten; ``kind``: the ``type`` beside it."""
        return self._inner(key, within(key, value, kind), is_map=key in MAPS)

    def _inner(self, step: str, schema: Any, *, is_map: bool = False) -> Any:
        """Return the part ``schema``, rewritten; ``step``: its key or index in the part that
        contains it.
        """
        self._path.append(step)
        try:
            return self.schema(schema, is_map=is_map)
        finally:
            self._path.pop()

    @property
    def _where(self) -> str:
        """The place of the current part for messages: " (at #/properties/a)"; "" at the root."""
        steps = (step.replace("~", "~0").replace("/", "~1") for step in self._path)
        return f" (at #/{'/'.join(steps):.200})" if self._path else ""

    def _keeps(self, key: str, value: Any, shown: str = "") -> bool:
        """Return whether a keyword can be enforced; if not, raise GrammarError or add a message to
        ``left_out``. Keywords that are not checked here count as enforceable. ``shown``: name for
        the message.
        """
        fault = self._fault(key, value)
        if fault:
            message = (
                f'JSON schema: "{shown or key}": {json.dumps(value):.200} {fault}{self._where}'
            )
            if self._left_out is None:
                raise GrammarError(message)
            self._left_out.append(f"{message}: left out")
        return not fault

    def _fault(self, key: str, value: Any) -> str:
        if key in COUNTS or not isinstance(value, str):
            return self._numbers.fault(key, value)
        if key == "format" and value == "unknown":  # llguidance accepts any string for it
            return "is not a format that can be enforced"
        if key == "pattern":
            return _pattern_fault(value)
        if key == "$ref" and not self._parts.leads(value):
            return "refers to nothing in this schema"
        return ""


@lru_cache(1024)
def _pattern_fault(pattern: str) -> str:
    """Return the reason why a pattern cannot be enforced, or ""."""
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    except ValueError:  # llguidance reads it as UTF-8
        return "cannot be enforced: it has an unpaired surrogate"
    message = LLMatcher.validate_grammar(source).rpartition("error: ")[2]
    return f"cannot be enforced: {' '.join(message.split())}" if message else ""
