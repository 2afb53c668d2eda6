"""The tools of a call: which there are, and which the model must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import TreadleError
from treadle.record import dataclass
from treadle.server.fields import flag, mapping, text
from treadle.server.problems import ApiError
from treadle.speech.functions import check_tool
from treadle.speech.schemas import without_nulls

MAX_TOOLS = 512


@dataclass(frozen=True)
class Tools:
    """Functions as OpenAI's chat has them. ``forced``: the names of which one must be called."""

    functions: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the arguments, by name."""
        own = [tool["function"] for tool in self.functions]
        return {function["name"]: function.get("parameters") or {} for function in own}

    @property
    def strict(self) -> frozenset[str]:
        """The names of those whose schemas must be enforced whole."""
        own = [tool["function"] for tool in self.functions]
        return frozenset(function["name"] for function in own if function.get("strict"))


def read_tools(given: Mapping[str, Any]) -> Tools:
    """From ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises ApiError."""
    choice = given.get("tool_choice", "auto")
    tools = given.get("tools", [])
    if not tools:
        if choice not in ("auto", "none"):
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        return Tools()
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools: {len(tools)}, at most {MAX_TOOLS}", param="tools")
    functions = tuple(_function(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in functions]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have one name", param="tools")
    if choice == "none":
        return Tools()
    forced = _forced(choice, names)
    named = isinstance(choice, dict)  # then there is one call
    return Tools(functions, forced, given.get("parallel_tool_calls", True) and not named)


def _function(name: str, tool: Any) -> dict[str, Any]:
    if mapping(name, tool).get("type") != "function":
        raise ApiError(400, f"{name}.type: only functions can be called", param="tools")
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


def _forced(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names of which one must be called; none for "auto"."""
    if choice == "auto":
        return ()
    if choice == "required":
        return tuple(names)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = mapping("tool_choice", choice.get("function", choice)).get("name")
        if isinstance(name, str) and name in names:
            return (name,)
        raise ApiError(400, f"tool_choice: there is no tool {name!r:.80}", param="tool_choice")
    raise ApiError(
        400, "tool_choice: expected auto, none, required or a function", param="tool_choice"
    )
