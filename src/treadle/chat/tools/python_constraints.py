"""Constraints in the metadata of ``Annotated``: descriptions, pydantic's ``Field``, and the
constraints of annotated_types. Metadata of other libraries is ignored.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from treadle.base.validate import is_number
from treadle.errors import TreadleError

_LIBRARIES = ("pydantic", "pydantic_core", "annotated_types")
_NUMBER = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
# Schema keyword of each constraint, by the type that it constrains.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "integer": _NUMBER,
    "number": _NUMBER,
    "string": {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
    "array": {"min_length": "minItems", "max_length": "maxItems"},
    "object": {"min_length": "minProperties", "max_length": "maxProperties"},
}
_WORDS = frozenset(word for keys in _KEYS.values() for word in keys)
_LEAST = ("ge", "gt", "min_length")
_MOST = ("le", "lt", "max_length")
_CHECKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "multiple_of": lambda value, of: Fraction(str(value)) % Fraction(str(of)) == 0,
}
_ANNOTATIONS = ("title", "description", "examples")
_ALIASES = ("alias", "validation_alias", "serialization_alias")
_ALWAYS_ENFORCED = ("strict", "allow_inf_nan")  # enforced by JSON and ``value_of`` in any case


def narrowed(schema: dict[str, Any], notes: Sequence[Any], where: str) -> dict[str, Any]:
    """Return a schema with the constraints and texts of ``notes``, the metadata of ``Annotated``.
    Raises TreadleError, which names ``where``, for a constraint that a JSON schema cannot express.
    """
    said: dict[str, Any] = {}
    for note in notes:
        if is_field(note) and not note.is_required():
            raise TreadleError(
                f"{where}: Field(default=...) within Annotated: write the default after ="
            )
        said |= _said_by(note, where)
    return _narrowed(schema, notes, said, where)


def narrowed_by_default(schema: dict[str, Any], field: Any, where: str) -> dict[str, Any]:
    """Return a schema with the constraints and texts of a parameter's default ``field``, such as
    ``x: int = Field(3, ge=1)``. Raises as ``narrowed`` does.
    """
    return _narrowed(schema, [field], _said_by(field, where), where)


def _narrowed(
    schema: dict[str, Any], notes: Sequence[Any], said: Mapping[str, Any], where: str
) -> dict[str, Any]:
    words = _words(notes, where)
    return {**(_with(schema, words, where) if words else schema), **said}


def check(notes: Sequence[Any], value: Any) -> None:
    """Raise ValueError if ``value`` violates a constraint of ``notes``, the metadata of
    ``Annotated``.
    """
    for word, limit in _words(notes, "").items():
        if not _holds(word, limit, value):
            raise ValueError(f"{value!r:.60}: expected {word}={limit!r:.60}")


def is_field(given: Any) -> bool:
    """Whether ``given`` is a result of pydantic's ``Field``."""
    return _is_ours(given) and hasattr(given, "is_required") and hasattr(given, "metadata")


def _is_ours(note: Any) -> bool:
    return type(note).__module__.partition(".")[0] in _LIBRARIES


def _said_by(note: Any, where: str) -> dict[str, Any]:
    """Return the schema keywords of a note that describe and do not constrain: title, description,
    examples, and extra ones. Raises TreadleError, which names ``where``, for an alias.
    """
    if isinstance(note, str):
        return {"description": note}
    if isinstance(text := getattr(note, "documentation", None), str):  # typing's Doc
        return {"description": text}
    if not is_field(note):
        return {}
    if alias := next((name for name in _ALIASES if getattr(note, name, None) is not None), None):
        raise TreadleError(f"{where}: Field({alias}=...): aliases are not supported")
    said = {key: value for key in _ANNOTATIONS if (value := getattr(note, key)) is not None}
    extra = note.json_schema_extra
    if callable(extra):
        raise TreadleError(f"{where}: Field(json_schema_extra=...): expected a dict")
    return {**said, **(extra or {})}


def _words(notes: Sequence[Any], where: str) -> dict[str, Any]:
    """Return the constraints of all notes by name, such as ``ge``; of several minimums or maximums
    the tightest. Raises TreadleError, which names ``where``, for others given twice.
    """
    words: dict[str, Any] = {}
    for note in notes:
        for word, value in _words_of(note, where):
            if isinstance(value, re.Pattern):
                value = value.pattern
            if word in words and words[word] != value:
                if word not in (*_LEAST, *_MOST):
                    raise TreadleError(f"{where}: {word} is given twice, with different values")
                value = (max if word in _LEAST else min)(words[word], value)
            words[word] = value
    return words


def _words_of(note: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not _is_ours(note):
        return
    if is_field(note):
        for part in note.metadata:
            yield from _words_of(part, where)
        return
    if hasattr(note, "__iter__"):  # a group of constraints
        for part in note:
            yield from _words_of(part, where)
        return
    fields = dataclasses.fields(note) if dataclasses.is_dataclass(note) else ()
    named = {each.name: getattr(note, each.name) for each in fields} or getattr(
        note, "__dict__", {}
    )
    name = type(note).__name__
    for word, value in named.items():
        if word in _WORDS:
            yield word, value
        elif value is not None and word not in _ALWAYS_ENFORCED:
            what = word if name.startswith("_") else name
            raise TreadleError(f"{where}: {what} cannot be expressed in a JSON schema")
    if not named:
        raise TreadleError(f"{where}: {name} cannot be expressed in a JSON schema")


def _with(schema: dict[str, Any], words: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a schema with the constraints ``words`` added. If it has alternatives, only those that
    the constraints apply to change. Raises TreadleError, which names ``where``, if they apply to
    none.
    """
    if parts := schema.get("anyOf"):
        fit = [words.keys() <= _KEYS.get(part.get("type"), {}).keys() for part in parts]
        if any(fit):
            each = [
                _with(part, words, where) if fits else part
                for part, fits in zip(parts, fit, strict=True)
            ]
            return {**schema, "anyOf": each}
    keys = _KEYS.get(schema.get("type", ""), {})
    if "enum" in schema or not words.keys() <= keys.keys():
        word = min(words.keys() - keys.keys(), default=min(words))
        raise TreadleError(f"{where}: {word} does not apply to this type")
    result = dict(schema)
    for word, value in words.items():
        key = keys[word]
        if key in result and result[key] != value:
            if word not in (*_LEAST, *_MOST):
                raise TreadleError(f"{where}: {word} is given twice, with different values")
            value = (max if word in _LEAST else min)(result[key], value)
        result[key] = value
    return result


def _holds(word: str, limit: Any, value: Any) -> bool:
    if word in _NUMBER:
        if not is_number(value):
            return True  # the constraint is for another alternative of the type
        return bool(_CHECKS[word](value, limit))
    if word == "pattern":
        try:
            return not isinstance(value, str) or bool(re.search(limit, value))
        except re.error:  # pydantic's regular expressions differ
            return True
    if not hasattr(value, "__len__"):
        return True
    return bool(len(value) >= limit if word == "min_length" else len(value) <= limit)
