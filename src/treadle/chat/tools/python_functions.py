"""Python functions as tools: a JSON schema from signature and docstring, and calls with JSON
arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from treadle.chat.tools.python_annotations import Schemas, to_json, value_of
from treadle.chat.tools.python_constraints import check, is_field, narrowed_by_default
from treadle.errors import TreadleError

Function = Callable[..., Any]
_REST = re.compile(r"^\s*:param\s+(?:\w+\s+)?(\w+):\s*(.*)", re.M)
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # OpenAI's characters, Anthropic's length
_GOOGLE = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(\S.*)", re.M)


def tool_of(function: Function) -> dict[str, Any]:
    """Return a function as a tool object of OpenAI's chat API. Raises TreadleError for parameters
    whose type JSON lacks.
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise TreadleError(f"tools: expected named functions or dicts, found {function!r:.60}")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # anything that an annotation raises
        raise TreadleError(f"tool {name}: cannot resolve its annotations: {error}") from error
    said, told = _documented(inspect.getdoc(function) or "")
    properties = {}
    required = []
    schemas = Schemas()
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # a builtin without a signature
        raise TreadleError(f"tool {name}: {error}") from None
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TreadleError(f"tool {name}: {parameter} cannot be passed by name")
        where = f"tool {name}: {parameter.name}"
        schema = schemas.of(hints.get(parameter.name, Any), where)
        if parameter.name in told:
            schema.setdefault("description", told[parameter.name])
        if is_field(parameter.default):
            schema = narrowed_by_default(schema, parameter.default, where)
        if parameter.default is parameter.empty or _is_needed(parameter.default):
            required.append(parameter.name)
        properties[parameter.name] = schema
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **({"$defs": schemas.defs} if schemas.defs else {}),
    }
    own = {"name": name, "description": said, "parameters": schema}
    return {"type": "function", "function": own}


def check_tool(name: Any, parameters: Any) -> None:
    """Raise TreadleError for a tool's name that some call format could not write unchanged, and for
    ``parameters`` (a schema) that no object satisfies.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TreadleError(
            f"tool {name!r:.80}: expected a name of 1 to 128 letters, digits, '_', '.' and '-'"
        )
    if not _allows_object(parameters):
        raise TreadleError(f"tool {name}: the schema of its parameters allows no object")


def _allows_object(schema: Any) -> bool:
    """Whether a schema may allow an object, judged by the keywords that restrict types."""
    if not isinstance(schema, Mapping):
        return schema is not False
    kinds = schema.get("type", "object")
    choices = schema.get("enum")
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
    """Return a docstring's first paragraph, and its descriptions of parameters by name."""
    said = " ".join(text.split("\n\n")[0].split())
    told = dict(_REST.findall(text))
    _, found, rest = text.partition("Args:\n")
    if found:
        told |= dict(_GOOGLE.findall(rest.split("\n\n")[0]))
    return said, told


def result_of(function: Function, arguments: str) -> str:
    """Call the function with ``arguments``, a JSON object. Return its result as text for the model
    (JSON unless it is a string); if it raises, "error: " and the error, so that the model can
    correct the call.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        given = json.loads(arguments)
        own = _fields(function)
        values = {key: _given(hints, key, given[key]) for key in given}
        for name, field in own.items():
            if name in values:
                _checked(name, partial(check, [field], values[name]))
            elif not _is_needed(field):
                values[name] = field.get_default(call_default_factory=True)
        found = function(**values)
        if inspect.isawaitable(found):
            found = _awaited(found)
        return found if isinstance(found, str) else json.dumps(found, default=to_json)
    except Exception as error:  # any error of the function
        return f"error: {type(error).__name__}: {error}"


def _fields(function: Function) -> dict[str, Any]:
    """Return the parameters whose default is pydantic's ``Field``, by name: ``x: int = Field(3,
    ge=1)``.
    """
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if is_field(each.default)}


def _is_needed(default: Any) -> bool:
    return is_field(default) and bool(default.is_required())


def _given(hints: Mapping[str, Any], name: str, value: Any) -> Any:
    return _checked(name, lambda: value_of(hints.get(name, Any), value))


def _checked(name: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``; its TypeError or ValueError is raised again with the parameter's name."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        if type(error) in (TypeError, ValueError):  # most likely ours: they name no parameter
            raise type(error)(f"{name}: {error}") from error
        raise


def _awaited(found: Awaitable[Any]) -> Any:
    """Return the result of the coroutine ``found``. It runs in another thread, because this one may
    already run an event loop.
    """

    async def wait() -> Any:
        return await found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(wait())).result()
