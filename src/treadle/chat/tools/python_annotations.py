"""Converts Python annotations to JSON schemas, and JSON values to the annotated types."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, Union

from treadle.chat.tools.python_constraints import check, narrowed
from treadle.errors import TreadleError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    Sequence: list,
    Collection: list,
    Iterable: list,
}
_MAPS = (dict, Mapping)
_UNIONS = (Union, types.UnionType)
# Markers of TypedDict keys, handled in ``_named``. Compared by name: Python 3.10 has them only in
# typing_extensions.
_REQUIRED = "Required"
_NOT_REQUIRED = "NotRequired"
_WRAPPED = (_REQUIRED, _NOT_REQUIRED)
_PYDANTIC = "__pydantic_validator__"  # attribute of pydantic's dataclasses


class _TypedProperties(NamedTuple):
    """Fields of a class that is an object in JSON: ``kinds``, their annotations by name;
    ``required``, the names of those that an object must have. ``make``: builds an instance from
    keyword arguments.
    """

    kinds: Mapping[str, Any]
    required: Collection[str]
    make: Callable[..., Any]


class Schemas:
    """Builder of the JSON schemas of one function's parameters. ``defs``: definitions by name, to
    which ``$ref`` points.
    """

    def __init__(self) -> None:
        self.defs: dict[str, Any] = {}
        self._within: list[Any] = []  # the classes being visited
        self._recursive: set[Any] = set()

    def of(self, kind: Any, where: str) -> dict[str, Any]:
        """Return the schema of the annotation ``kind``. Raises TreadleError, which names ``where``,
        for types that JSON lacks.
        """
        kind = _renamed(kind)
        if _is_alias(kind):
            return self._alias(kind, where)
        if kind is Any:
            return {}
        if isinstance(kind, type) and kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if hasattr(kind, "model_json_schema") or hasattr(kind, _PYDANTIC):
            own = _schema_of(kind)
            for name, part in own.pop("$defs", {}).items():
                self._define(name, part, where)
            return own
        origin = typing.get_origin(kind)
        inner = typing.get_args(kind)
        if origin is typing.Annotated:
            return narrowed(self.of(inner[0], where), inner[1:], where)
        if _name_of(origin) in _WRAPPED:
            return self.of(inner[0], where)
        if (choices := _choices(kind)) is not None:
            values = [value for value, _ in choices]
            if not all(map(_is_plain, values)):
                raise TreadleError(f"{where}: {kind} has values without a JSON equivalent")
            return {"enum": values}
        if origin in _UNIONS:
            return {"anyOf": [self.of(each, where) for each in inner]}
        if (named := _named(kind, where)) is not None:
            return self._object(kind, named, where)
        base = origin or kind
        if base is tuple and inner and ... not in inner:
            items = [self.of(each, where) for each in inner]
            n = len(items)
            return {"type": "array", "prefixItems": items, "minItems": n, "maxItems": n}
        if base in _LISTS:
            item = next((each for each in inner if each is not ...), Any)
            return {"type": "array", "items": self.of(item, where)}
        if base in _MAPS and (not inner or inner[0] is str):
            more = self.of(inner[1], where) if inner else {}
            return {"type": "object", **({"additionalProperties": more} if more else {})}
        raise TreadleError(f"{where}: type {kind} has no JSON equivalent")

    def _alias(self, kind: Any, where: str) -> dict[str, Any]:
        """Return the schema of a ``type X = ...`` alias: inline, or a reference if the alias
        contains itself. ``where``: the parameter, for errors.
        """
        ref = {"$ref": f"#/$defs/{kind.__name__}"}
        if kind in self._within or kind in self._recursive:
            self._recursive.add(kind)
            return ref
        self._within.append(kind)
        try:
            behind = kind.__value__
        except Exception as error:  # evaluating the alias may raise anything
            raise TreadleError(f"{where}: {kind}: {error}") from error
        result = self.of(behind, where)
        self._within.pop()
        if kind not in self._recursive:
            return result
        if _is_or_has(result, ref):
            raise TreadleError(f"{where}: type {kind} refers only to itself")
        self._define(kind.__name__, result, where)
        return ref

    def _object(self, kind: Any, named: _TypedProperties, where: str) -> dict[str, Any]:
        """Return the object schema of the class ``kind`` with the fields ``named``: inline, or a
        reference if the class contains itself. ``where``: the parameter, for errors.
        """
        ref = {"$ref": f"#/$defs/{kind.__name__}"}
        if kind in self._within or kind in self._recursive:
            self._recursive.add(kind)
            return ref
        self._within.append(kind)
        result = {
            "type": "object",
            "properties": {
                name: self.of(each, f"{where}: {kind.__name__}.{name}")
                for name, each in named.kinds.items()
            },
            "required": [name for name in named.kinds if name in named.required],
            "additionalProperties": False,
        }
        self._within.pop()
        if kind not in self._recursive:
            return result
        self._define(kind.__name__, result, where)
        return ref

    def _define(self, name: str, part: Any, where: str) -> None:
        if self.defs.setdefault(name, part) != part:
            raise TreadleError(f"{where}: two classes are named {name}")


def value_of(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type ``kind``. Raises TypeError or ValueError if the
    annotation's schema does not allow it, and any error that the type's constructor raises.
    """
    kind = _bare(kind)
    if isinstance(kind, type) and kind in _PLAIN:
        return _plain_of(kind, value)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    if hasattr(kind, _PYDANTIC):
        return getattr(kind, _PYDANTIC).validate_python(value)
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is typing.Annotated:
        result = value_of(inner[0], value)
        check(inner[1:], result)
        return result
    if _name_of(origin) in _WRAPPED:
        return value_of(inner[0], value)
    if (choices := _choices(kind)) is not None:
        for choice, result in choices:
            if _is_same(choice, value):
                return result
        raise ValueError(f"{value!r:.60} is not one of {[choice for choice, _ in choices]!r:.200}")
    if origin in _UNIONS:
        return _of_one(inner, value)
    if (named := _named(kind, "")) is not None:
        return _object_of(kind, named, value)
    base = origin or kind
    if base in _LISTS:
        return _list_of(base, inner, value)
    if base in _MAPS:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.60} is not an object")
        values = inner[1] if len(inner) == 2 else Any
        return {key: value_of(values, each) for key, each in value.items()}
    return value


def _bare(kind: Any) -> Any:
    """Return the type that aliases and NewTypes stand for."""
    met: list[Any] = []
    while _is_alias(kind := _renamed(kind)):
        if kind in met:
            raise TypeError(f"type {kind} refers only to itself")
        met.append(kind)
        kind = kind.__value__
    return kind


def _renamed(kind: Any) -> Any:
    """Return the type that a NewType stands for; other types unchanged."""
    while (behind := getattr(kind, "__supertype__", None)) is not None:
        kind = behind
    return kind


def _is_alias(kind: Any) -> bool:
    """Whether ``kind`` is a ``type X = ...`` alias; before Python 3.12 these come from
    typing_extensions.
    """
    return type(kind).__name__ == "TypeAliasType"


def _is_or_has(schema: Mapping[str, Any], ref: Mapping[str, Any]) -> bool:
    """Whether a schema equals the reference ``ref``, or an alternative in its ``anyOf`` does."""
    return schema == ref or any(_is_or_has(part, ref) for part in schema.get("anyOf", ()))


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return pydantic's JSON schema of a model or a pydantic dataclass."""
    if hasattr(kind, "model_json_schema"):
        return dict(kind.model_json_schema())
    # Pydantic is loaded: the class is made by it.
    schema: dict[str, Any] = sys.modules["pydantic"].TypeAdapter(kind).json_schema()
    return schema


def _name_of(origin: Any) -> str | None:
    """Return the name of a special form of typing, such as "Required"; None for other objects."""
    return getattr(origin, "_name", None)


def _plain_of(kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60}: expected type {_PLAIN[kind]}")
    return value


def _of_one(kinds: Sequence[Any], value: Any) -> Any:
    """Convert ``value`` to the first of ``kinds`` that accepts it; the value's own type is tried
    first. Raises ValueError if none does.
    """
    why = [f"{value!r:.60} matches none of the allowed types"]
    for each in sorted(kinds, key=lambda each: _bare(each) is not type(value)):
        try:
            return value_of(each, value)
        except (TypeError, ValueError) as error:
            why.append(str(error))
    raise ValueError("; ".join(why))


def _object_of(kind: Any, named: _TypedProperties, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.60} is not an object")
    surplus = [name for name in value if name not in named.kinds]
    missing = [name for name in named.required if name not in value]
    if surplus or missing:
        said = [f"unknown {name!r}" for name in surplus] + [f"missing {name!r}" for name in missing]
        raise TypeError(f"{kind.__name__}: {', '.join(sorted(said))}")
    return named.make(**{key: value_of(named.kinds[key], each) for key, each in value.items()})


def _list_of(base: Any, inner: Sequence[Any], value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.60} is not an array")
    if base is tuple and inner and ... not in inner:
        if len(value) != len(inner):
            raise ValueError(f"{len(value)} elements: expected {len(inner)}")
        return tuple(map(value_of, inner, value))
    item = next((each for each in inner if each is not ...), Any)
    return _LISTS[base]([value_of(item, each) for each in value])


# -- literals and enumerations ----------------------------------------------------------------


def _choices(kind: Any) -> list[tuple[Any, Any]] | None:
    """Return pairs of JSON value and Python value of a Literal or an Enum; None for other types.
    For an Enum with values that JSON lacks, the JSON values are its members' names.
    """
    if typing.get_origin(kind) is Literal:
        members = typing.get_args(kind)
        values = [each.value if isinstance(each, Enum) else each for each in members]
        return list(zip(values, members, strict=True))
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return None
    named = not all(_is_plain(each.value) for each in kind)
    return [(each.name if named else each.value, each) for each in kind]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_same(choice: Any, value: Any) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0, but not true."""
    return bool(choice == value) and isinstance(choice, bool) == isinstance(value, bool)


# -- classes with fields ----------------------------------------------------------------------


def _named(kind: Any, where: str) -> _TypedProperties | None:
    """Return the fields of ``kind`` if it is a dataclass, a TypedDict or a NamedTuple; None for
    other types. Raises TreadleError, which names ``where``, if its annotations cannot be resolved.
    """
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        fields = [each for each in dataclasses.fields(kind) if each.init]
        lacking = dataclasses.MISSING
        required = [
            each.name
            for each in fields
            if each.default is lacking and each.default_factory is lacking
        ]
        names: Iterable[str] = [each.name for each in fields]
    elif hasattr(kind, "__required_keys__"):  # a TypedDict, of typing_extensions too
        names = kind.__annotations__
        required = list(kind.__required_keys__)
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        names = kind._fields
        required = [name for name in kind._fields if name not in kind._field_defaults]  # type: ignore[attr-defined]
    else:
        return None
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except Exception as error:  # whatever an annotation raises
        raise TreadleError(
            f"{where}: {kind.__name__}: cannot resolve its annotations: {error}"
        ) from error
    # With annotations as strings, __required_keys__ misses these two markers.
    said = {name: _name_of(typing.get_origin(hints.get(name))) for name in names}
    needed = [
        name
        for name in names
        if said[name] == _REQUIRED or (name in required and said[name] != _NOT_REQUIRED)
    ]
    return _TypedProperties({name: hints.get(name, Any) for name in names}, needed, kind)


def to_json(value: Any) -> Any:
    """Convert a function's result of a type that JSON lacks, as ``default`` of ``json.dumps``;
    types that are not known become ``str(value)``.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump(mode="json")
    if isinstance(value, Enum):
        return value.value if _is_plain(value.value) else value.name
    return list(value) if isinstance(value, set | frozenset) else str(value)
