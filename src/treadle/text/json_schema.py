"""JSON schemas for ``llguidance``: what is stricter here than there.

White space is what llama.cpp's grammars allow between two tokens: a space, or a line break and its
indentation. Otherwise a model may write white space until its length is used up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from treadle.errors import GrammarError

WHITESPACE = r" |\n[ \t]{0,20}"

_LEAP = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"  # 4, 100, 400
)
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
# Without second 60: which minutes have one is not known before they come. Nine digits of a second
# are nanoseconds; a model could go on with digits for ever.
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

# Formats whose regular expression in llguidance takes too much: each must match all of these.
FORMATS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "email": (f"^{_ATOM}(?:\\.{_ATOM})*@{_LABEL}(?:\\.{_LABEL})*$", "^[^@]{1,64}@.{1,253}$"),
    "hostname": (f"^{_LABEL}(?:\\.{_LABEL})*$", "^.{1,253}$"),
}

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "example")


@runtime_checkable
class HasSchema(Protocol):
    """What a pydantic class is, for one: something that can tell its schema."""

    def model_json_schema(self) -> Any:
        """The schema as an object of JSON."""


Schema = str | Mapping[str, Any] | bool | HasSchema


def schema_source(schema: Schema, *, lenient: bool = False) -> str:
    """llguidance's grammar of a schema: text, a parsed object, or a pydantic class. ``lenient``:
    what it cannot enforce is a warning.

    Raises GrammarError for what is no JSON.
    """
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    try:
        return str(LLMatcher.grammar_from_json_schema(schema_text(schema), defaults=options))
    except ValueError as e:
        raise GrammarError(f"JSON schema: {e}") from None


def inline_schema(schema: Schema, *, lenient: bool = False) -> str:
    """A schema as a part of a rule in llguidance's notation. Raises GrammarError."""
    value = _read(schema)
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}
    return f"%json {json.dumps({**options, **value} if value is not False else False)}"


def schema_text(schema: Schema) -> str:
    """A schema as JSON. Raises GrammarError."""
    return json.dumps(_read(schema))


def _read(schema: Schema) -> dict[str, Any] | Literal[False]:
    """A schema as an object, or false, which nothing fulfils."""
    if isinstance(schema, HasSchema):
        try:
            schema = schema.model_json_schema()
        except Exception as e:  # whatever that library raises: its class has no schema
            raise GrammarError(f"JSON schema: {type(e).__name__}: {e}") from e
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping | bool):
            raise GrammarError(
                "JSON schema: expected an object of JSON, its text, or a class with "
                f"model_json_schema, not {value!r:.80}"
            )
        made: dict[str, Any] = {} if value is True else _strict(value)
        json.dumps(made)
        return made
    except (TypeError, ValueError, RecursionError) as e:
        raise GrammarError(f"JSON schema: {e}") from None


def _strict(schema: Any, *, is_map: bool = False) -> Any:
    """The schema with the formats above as patterns; ``is_map``: its keys are names."""
    if isinstance(schema, list | tuple):
        return [_strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if is_map:
        return {name: _strict(item) for name, item in schema.items()}
    found = {
        key: value if key in _VALUES else _strict(value, is_map=key in _MAPS)
        for key, value in schema.items()
    }
    name = found.get("format")
    if name == "unknown":  # llguidance has a format of this name, which takes everything
        raise GrammarError('JSON schema: "format": "unknown" is no format that can be enforced')
    if isinstance(name, str) and name in FORMATS:
        del found["format"]
        others = found.get("allOf", [])
        if not isinstance(others, list):
            raise GrammarError(f"JSON schema: allOf is a list of schemas, not {others!r:.80}")
        found["allOf"] = [*others, *({"pattern": pattern} for pattern in FORMATS[name])]
    return found
