"""Tools of OpenAI's ``/v1/responses`` as chat functions, and ``tool_choice`` in chat's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, mapping, text
from treadle.server.requests.tools import MAX_TOOLS, limited_array

FUNCTION = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class ClientTool:
    """A function as its client knows it: its name and namespace (None without one). ``custom``: its
    arguments are one string. ``server``: the MCP server whose tool it is, None for the client's
    own; ``asks``: the client approves each of its calls.
    """

    name: str
    namespace: str | None = None
    custom: bool = False
    server: str | None = None
    asks: bool = False


@dataclass
class OfferedTools:
    """The tools of a request. ``functions``: in chat format; ``known``: the client's tool by the
    function's name; ``left_out``: types of tools that only OpenAI serves, which clients send to
    every server; ``unenforced``: warnings about grammars that are not enforced.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, ClientTool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unenforced: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about tools that are left out or not enforced."""
        return (*map(unserved, self.left_out), *self.unenforced)

    def add(self, tool: Any, namespace: str | None = None) -> None:
        """Add one tool, or all tools of a namespace. ``namespace``: the one that contains ``tool``,
        None at the top level. Raises ApiError.
        """
        kind = text("tools.type", mapping("tools", tool).get("type"))
        if len(self.functions) + len(self.left_out) > MAX_TOOLS:
            raise ApiError(400, f"tools: more than {MAX_TOOLS}", param="tools")
        if kind == "namespace":
            if namespace is not None:
                raise ApiError(400, "tools: namespaces cannot be nested", param="tools")
            within = text("tools.name", tool.get("name"))
            for inner in array("tools.tools", tool.get("tools") or []):
                self.add(inner, within)
        elif kind == "function":
            self._add(ClientTool(_name(tool), namespace), tool)
        elif kind == "custom":
            self._add(ClientTool(_name(tool), namespace, custom=True), self._custom(tool))
        elif kind not in self.left_out:
            self.left_out.append(kind)

    def _add(self, known: ClientTool, function: Mapping[str, Any]) -> None:
        name = flat_name(known.namespace, known.name)
        own = {key: function[key] for key in FUNCTION if function.get(key) is not None}
        self.known[name] = known
        self.functions.append({"type": "function", "function": {**own, "name": name}})

    def _custom(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return a custom tool as a function with one string argument, ``input``. Of its grammars
        only a regex can be enforced, as a pattern of that string; others are described to the
        model.
        """
        form = mapping("tools.format", tool.get("format") or {"type": "text"})
        schema: dict[str, Any] = {"type": "string"}
        if form.get("type") == "grammar":
            syntax = text("tools.format.syntax", form.get("syntax"))
            rule = text("tools.format.definition", form.get("definition"))
            schema["description"] = f"A text of this grammar ({syntax}):\n{rule}"
            if syntax == "regex":
                schema["pattern"] = f"^(?:{rule})$"
            else:
                self.unenforced.append(f"tool {tool['name']!r:.80}: the grammar is not enforced")
        parameters = {"type": "object", "properties": {"input": schema}, "required": ["input"]}
        return {**tool, "parameters": {**parameters, "additionalProperties": False}}

    def named(self, choice: Mapping[str, Any]) -> Iterator[str]:
        """Yield the function names that ``choice``, a tool in ``tool_choice``, means: one, or a
        namespace.
        """
        name = choice.get("name")
        namespace = choice.get("namespace")
        if choice.get("type") == "namespace":
            yield from (own for own, known in self.known.items() if known.namespace == name)
        elif namespace is None and isinstance(name, str) and name in self.known:
            yield name
        else:
            for own, known in self.known.items():
                if name == known.name and namespace in (None, known.namespace):
                    yield own


def read_response_tools(tools: list[Any]) -> OfferedTools:
    """Return a body's tools as chat functions. Raises ApiError."""
    offered = OfferedTools()
    for tool in tools:
        offered.add(tool)
    return offered


def chat_choice(choice: Any, offered: OfferedTools) -> Any:
    """Return ``tool_choice`` of a body of ``/v1/responses`` in chat's form, for the functions in
    ``offered``. Raises ApiError if it demands a tool that is left out.
    """
    if choice == "required" and not offered.functions and offered.left_out:
        raise _unserved_choice(offered.left_out[0])
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice, offered)
    if kind not in ("function", "custom"):
        raise _unserved_choice(kind)
    found = next(offered.named(choice), choice.get("name"))  # if None, chat reports it
    return {"type": "function", "function": {"name": found}}


def _allowed(choice: Mapping[str, Any], offered: OfferedTools) -> dict[str, Any] | str:
    """Return ``choice``, a ``tool_choice`` of type ``allowed_tools``, in chat's form, without tools
    that are left out.
    """
    tools: list[Any] = []
    for tool in limited_array("tool_choice.tools", choice.get("tools")):
        if mapping("tool_choice.tools", tool).get("type") in offered.left_out:
            continue
        names = list(offered.named(tool)) or [tool.get("name")]
        tools += [{"type": "function", "function": {"name": name}} for name in names]
    if not offered.functions and choice.get("mode") == "auto":
        return "auto"
    own = {"mode": choice.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": own}


def flat_name(namespace: Any, name: Any) -> Any:
    """Return the function's name for the model: ``NAMESPACE__NAME``, or ``name`` without a
    namespace.
    """
    both = isinstance(namespace, str) and isinstance(name, str) and namespace
    return f"{namespace.rstrip('_')}__{name}" if both else name


def unserved(kind: str) -> str:
    """Return the warning about a tool of type ``kind``, which is left out."""
    return f"tools: type {kind!r:.40} is not supported: the tool is left out"


def _unserved_choice(kind: Any) -> ApiError:
    return ApiError(
        400,
        f"tool_choice: type {kind!r:.40} is not supported: only functions can be called",
        param="tool_choice",
    )


def _name(tool: Mapping[str, Any]) -> str:
    return text("tools.name", tool.get("name"))
