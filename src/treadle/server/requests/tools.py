"""The tools of a request: which the model may call, and which it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.chat.tools.python_functions import check_tool
from treadle.chat.tools.schemas import without_nulls
from treadle.errors import TreadleError
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, flag, mapping, one_of, text

MAX_TOOLS = 512


@dataclass(frozen=True)
class RequestTools:
    """Tools (``functions``) in OpenAI's chat format, all shown to the model. ``allowed``: names
    that it may call; ``forced``: names of which it must call one (empty: none); ``parallel``:
    whether it may make several calls in one answer.
    """

    functions: tuple[dict[str, Any], ...] = ()
    allowed: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of the allowed tools' arguments, by name."""
        return {function["name"]: function.get("parameters") or {} for function in self._callable()}

    @property
    def strict(self) -> frozenset[str]:
        """Names of the allowed tools whose schemas must be enforced completely."""
        own = self._callable()
        return frozenset(function["name"] for function in own if function.get("strict"))

    def _callable(self) -> list[dict[str, Any]]:
        own = [tool["function"] for tool in self.functions]
        return [function for function in own if function["name"] in self.allowed]


def read_tools(given: Mapping[str, Any]) -> RequestTools:
    """Return the tools in ``given``, a body's fields ``tools``, ``tool_choice`` and
    ``parallel_tool_calls``. With choice "none" the result has no tools. Raises ApiError.
    """
    choice = given.get("tool_choice", "auto")
    tools = given.get("tools", [])
    if not tools:
        if choice not in ("auto", "none"):
            raise ApiError(400, "tool_choice: the request has no tools", param="tool_choice")
        return RequestTools()
    functions = tuple(
        _function(f"tools[{i}]", t) for i, t in enumerate(limited_array("tools", tools))
    )
    names = [tool["function"]["name"] for tool in functions]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ApiError(400, f"tools: two have the name {twice[0]!r}", param="tools")
    if choice == "none":
        return RequestTools()
    parallel = given.get("parallel_tool_calls", True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return RequestTools(functions, *_allowed(choice, names), parallel)
    named = isinstance(choice, dict)  # then there is exactly one call
    return RequestTools(functions, tuple(names), _forced(choice, names), parallel and not named)


def limited_array(name: str, value: Any) -> list[Any]:
    """Return ``value``, an array of at most ``MAX_TOOLS`` items. ``name``: its field, for errors.
    Raises ApiError for other values.
    """
    found = array(name, value)
    if len(found) > MAX_TOOLS:
        raise ApiError(400, f"{name}: {len(found)} items, at most {MAX_TOOLS}", param=name)
    return found


def _function(name: str, tool: Any) -> dict[str, Any]:
    if mapping(name, tool).get("type") != "function":
        raise ApiError(400, f"{name}.type: expected function", param="tools")
    function = mapping(f"{name}.function", tool.get("function"))
    text(f"{name}.function.name", function.get("name"))
    if function.get("parameters") is not None:
        parameters = mapping(f"{name}.function.parameters", function["parameters"])
        function = {**function, "parameters": without_nulls(parameters)}
    try:
        check_tool(function["name"], function.get("parameters"))
    except TreadleError as error:
        raise ApiError(400, f"{name}: {error}", param="tools") from None
    if function.get("strict") is not None:
        flag(f"{name}.function.strict", function["strict"])
    return {"type": "function", "function": function}


def _allowed(
    choice: Mapping[str, Any], names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read a ``tool_choice`` of type ``allowed_tools``: return the names that may be called, and
    those of which one must be called. ``names``: of all tools.
    """
    where = "tool_choice.allowed_tools"
    given = mapping(where, choice.get("allowed_tools", choice))  # Responses has it one level up
    mode = one_of("auto", "required")(f"{where}.mode", given.get("mode"))
    tools = [
        mapping(f"{where}.tools", t) for t in limited_array(f"{where}.tools", given.get("tools"))
    ]
    allowed = tuple(dict.fromkeys(_chosen(tool, names) for tool in tools))
    if mode == "auto":
        return allowed, ()
    if not allowed:
        raise ApiError(400, "tool_choice: no tool is allowed", param="tool_choice")
    return allowed, allowed


def _chosen(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the function's name in ``choice``. Raises ApiError unless it is one of ``names``."""
    name = mapping("tool_choice", choice.get("function", choice)).get("name")
    if isinstance(name, str) and name in names:
        return name
    raise ApiError(400, f"tool_choice: unknown tool {name!r:.80}", param="tool_choice")


def _forced(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of which one must be called, by ``choice``, a ``tool_choice``; () for
    "auto". ``names``: of all tools. Raises ApiError.
    """
    if choice == "auto":
        return ()
    if choice == "required":
        return tuple(names)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return (_chosen(choice, names),)
    raise ApiError(
        400,
        "tool_choice: expected auto, none, required, a function or allowed_tools",
        param="tool_choice",
    )
