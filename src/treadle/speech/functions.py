"""Python functions as tools: a schema from the signature and the docstring, and calls of them."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from treadle.errors import TreadleError

Function = Callable[..., Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS, _MAPS = (list, tuple, set, Sequence), (dict, Mapping)
_REST = re.compile(r"^\s*:param\s+(?:\w+\s+)?(\w+):\s*(.*)", re.M)
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # OpenAI's, as long as Anthropic's
_GOOGLE = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(\S.*)", re.M)


def tool_of(function: Function) -> dict[str, Any]:
    """A function as OpenAI's chat has it. Raises TreadleError for parameters that JSON has not."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise TreadleError(f"tools: expected named functions, or dicts, found {function!r:.60}")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # whatever an annotation raises
        raise TreadleError(f"tool {name}: its annotations: {error}") from error
    said, told = _documented(inspect.getdoc(function) or "")
    properties, required, defs = {}, [], dict[str, Any]()
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # a builtin's
        raise TreadleError(f"tool {name}: {error}") from None
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TreadleError(f"tool {name}: {parameter} cannot be given by name")
        where = f"tool {name}: {parameter.name}"
        schema = _schema(hints.get(parameter.name, Any), where, defs)
        if parameter.name in told:
            schema.setdefault("description", told[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    schema = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False, **({"$defs": defs} if defs else {}),
    }  # fmt: skip
    own = {"name": name, "description": said, "parameters": schema}
    return {"type": "function", "function": own}


def check_tool(name: Any, parameters: Any) -> None:
    """Raise TreadleError for a name that could not stand in a call as it is, whatever the family's
    notation, and for parameters that no object fulfils.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TreadleError(
            f"tool {name!r:.80}: expected a name of 1 to 128 letters, digits, '_', '.' and '-'"
        )
    if not _allows_object(parameters):
        raise TreadleError(f"tool {name}: its parameters allow no object")


def _allows_object(schema: Any) -> bool:
    """Whether an object may fulfil a schema, by what its keywords say of types."""
    if not isinstance(schema, Mapping):
        return schema is not False
    kinds, choices = schema.get("type", "object"), schema.get("enum")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return False
    if isinstance(choices, list) and not any(isinstance(each, Mapping) for each in choices):
        return False
    if "const" in schema and not isinstance(schema["const"], Mapping):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not enough(map(_allows_object, parts)):
            return False
    return True


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and what is said of each parameter."""
    said = " ".join(text.split("\n\n")[0].split())
    told = dict(_REST.findall(text))
    _, found, rest = text.partition("Args:\n")
    if found:
        told |= dict(_GOOGLE.findall(rest.split("\n\n")[0]))
    return said, told


def _schema(kind: Any, where: str, defs: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an annotation; what it refers to goes into ``defs``, for references lead
    from the root on.
    """
    if kind is Any:
        return {}
    if isinstance(kind, type) and kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if hasattr(kind, "model_json_schema"):  # pydantic's
        own = dict(kind.model_json_schema())
        for name, part in own.pop("$defs", {}).items():
            if defs.setdefault(name, part) != part:
                raise TreadleError(f"{where}: two classes have the name {name}")
        return own
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        texts = [note for note in inner[1:] if isinstance(note, str)]
        return {**_schema(inner[0], where, defs), **({"description": texts[0]} if texts else {})}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where, defs) for each in inner]}
    base = origin or kind
    if base in _LISTS:
        item = next((each for each in inner if each is not ...), Any)
        return {"type": "array", "items": _schema(item, where, defs)}
    if base in _MAPS and (not inner or inner[0] is str):
        values = _schema(inner[1], where, defs) if inner else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise TreadleError(f"{where} is {kind}: no type of JSON")


def result_of(function: Function, arguments: str) -> str:
    """What a call of it gives, as text for the model; an error is told, for the model to mend."""
    try:
        hints = typing.get_type_hints(function)
        given = json.loads(arguments)
        found = function(**{key: _value(hints.get(key, Any), given[key]) for key in given})
        if inspect.isawaitable(found):
            found = _awaited(found)
        return found if isinstance(found, str) else json.dumps(found, default=str)
    except Exception as error:  # the function's own, whatever it is
        return f"error: {type(error).__name__}: {error}"


def _value(kind: Any, value: Any) -> Any:
    """A value of JSON as an annotation has it: pydantic's classes are made of what a call says."""
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        classes = [each for each in inner if hasattr(each, "model_validate")]
        for each in classes if isinstance(value, dict) else ():
            with suppress(ValueError):  # the next may fit
                return each.model_validate(value)
        others = [each for each in inner if typing.get_origin(each) is not None]
        return _value(others[0], value) if len(others) == 1 else value
    if origin in _LISTS and isinstance(value, list):
        item = next((each for each in inner if each is not ...), Any)
        return [_value(item, each) for each in value]
    if origin in _MAPS and isinstance(value, dict) and len(inner) == 2:
        return {key: _value(inner[1], each) for key, each in value.items()}
    return value


def _awaited(found: Awaitable[Any]) -> Any:
    """What a function with ``async`` gives. In a thread of its own: here a loop may run already."""

    async def wait() -> Any:
        return await found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(wait())).result()
