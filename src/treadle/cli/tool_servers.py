"""Options of MCP servers, and the user's approval of their tools' calls in ``treadle chat``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.fast_classes import dataclass
from treadle.cli.options import Number, packed
from treadle.errors import printable
from treadle.mcp.config import ToolBounds

if TYPE_CHECKING:
    from concurrent.futures import Future

    from treadle.chat.tools import ToolCall
    from treadle.mcp.toolbox import Toolbox

YES = ("y", "yes")
ALWAYS = ("a", "always")
MAX_SHOWN = 400  # characters of a call's arguments and of its result


@dataclass(frozen=True)
class ToolServerOptions:
    """Values of the options ``--mcp``, ``--mcp-timeout``, ``--mcp-max-chars``, ``--mcp-rounds``."""

    mcp: Path | None  # file that names the servers
    mcp_timeout: float  # seconds
    mcp_max_chars: int  # of a tool's result
    mcp_rounds: int  # answers to one message, at most; the last calls no tools

    def open(self) -> Toolbox | None:
        """Start the MCP servers that the file names; None without ``--mcp``. Raises FileError for
        an invalid file, click.ClickException if the ``mcp`` package is not installed.
        """
        if self.mcp is None:
            return None
        from treadle.mcp.config import read_config
        from treadle.mcp.toolbox import Toolbox

        servers = read_config(self.mcp)
        if find_spec("mcp") is None:
            raise click.ClickException("--mcp needs the mcp package: pip install 'treadle[mcp]'")
        bounds = ToolBounds(
            call_s=self.mcp_timeout, characters=self.mcp_max_chars, rounds=self.mcp_rounds
        )
        return Toolbox(servers, bounds)


_OPTIONS = (
    click.option(
        "--mcp",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Offer the tools of the MCP servers in FILE, the JSON with mcpServers that other "
        "programs read.",
    ),
    click.option(
        "--mcp-timeout",
        type=Number(0, min_open=True),
        default=ToolBounds.call_s,
        show_default=True,
        metavar="S",
        help="Seconds for one call of a tool.",
    ),
    click.option(
        "--mcp-max-chars",
        type=click.IntRange(1),
        default=ToolBounds.characters,
        show_default=True,
        metavar="N",
        help="Characters of a tool's result; what is longer is cut.",
    ),
    click.option(
        "--mcp-rounds",
        type=click.IntRange(1, 1000),
        default=ToolBounds.rounds,
        show_default=True,
        metavar="N",
        help="Answers of the model to one request; the last cannot call tools.",
    ),
)
FIELDS = ("mcp", "mcp_timeout", "mcp_max_chars", "mcp_rounds")
tool_server_options = packed(
    "tool_servers", FIELDS, _OPTIONS, build=lambda values: ToolServerOptions(**values)
)


def tell_servers(toolbox: Toolbox, tell: Callable[[str], object]) -> None:
    """Call ``tell``, in another thread, once all servers have started: with each one's problem, and
    with the number of their tools.
    """

    def told(_: Future[None]) -> None:
        for name, why in toolbox.problems().items():
            tell(f"MCP server {name}: {why}")
        n = len(toolbox.known_tools())
        tell(f"{n} tools of {len(toolbox.servers) - len(toolbox.problems())} MCP servers")

    toolbox.started().add_done_callback(told)


class ToolApproval:
    """Runs tool calls that the user approves: once, or always for one tool. ``ask`` prints a
    question and returns the user's answer.
    """

    def __init__(self, toolbox: Toolbox, ask: Callable[[str], str]) -> None:
        self.toolbox = toolbox
        self._ask = ask
        self._always: set[str] = set()

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools in the form of OpenAI's chat API."""
        return [tool.function for tool in self.toolbox.tools()]

    def results(
        self, calls: Sequence[ToolCall], told: Callable[[str], object]
    ) -> list[dict[str, Any]]:
        """Run the calls that the user approves; return a message of the role "tool" for each call,
        refused ones included. ``told`` gets each result, shortened to a line.
        """
        made = []
        for call in calls:
            text = self._result(call)
            told(shortened(text))
            made.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return made

    def _result(self, call: ToolCall) -> str:
        from treadle.mcp.toolbox import REFUSED

        if call.name not in self._always:
            shown = f"{call.name} {shortened(call.arguments)}"
            answer = self._ask(f"run {shown}? y(es), n(o), a(lways)").strip().lower()
            if answer in ALWAYS:
                self._always.add(call.name)
            elif answer not in YES:
                return REFUSED
        return self.toolbox.call(call.name, call.arguments).text


def shortened(text: str) -> str:
    """Return a text as one line of at most MAX_SHOWN characters, with "..." if it was cut."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
