"""Options of ``treadle serve`` that are an engine's, as a router passes them on and presets write
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from treadle.base.fast_dataclass import dataclass
from treadle.cli.options import ModelCommand, SamplingOption

if TYPE_CHECKING:
    from treadle.cli.tool_servers import ToolServerOptions
    from treadle.server.requests.service import ServerSettings

ARGS = "treadle.serve.args"  # key in click's ``meta``: the command's arguments
# Parameters of ``serve`` that are an engine's, and may stand in a preset.
OF_ENGINES = frozenset(
    (
        *(
            "threads",
            "context",
            "n_ctx",
            "kv",
            "kv_k",
            "kv_v",
            "kv_bytes",
            "lora",
            "device",
            "sequences",
        ),
        *("control_vectors", "control_vector_layers"),
        *("mmproj", "no_mmproj", "image_max_tokens", "cache_dir", "cache_bytes"),
        *("speculate", "draft", "deterministic", "max_tokens", "max_requests", "max_queue_s"),
        *("chat_template", "chat_template_kwargs", "reasoning", "reasoning_budget"),
        *("reasoning_budget_message", "reasoning_preserve", "strict"),
        *("media_urls", "media_hosts", "slot_save_path"),
        *("mcp", "mcp_timeout", "mcp_max_chars", "mcp_rounds"),
    )
)
# Those of the door that each engine must have too.
PASSED_ON = frozenset(("log", "log_text", "metrics", "props"))


class ServeCommand(ModelCommand):
    """The command ``serve``, which keeps its arguments for the engines of a router."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises click.UsageError."""
        ctx.meta[ARGS] = [*args]
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class CheckedOptions:
    """The options of ``serve`` after their checks.

    loading: settings of ``treadle.load``. settings: of the server, without its MCP servers.
    """

    models: Sequence[str]
    loading: dict[str, Any]
    settings: ServerSettings
    tool_servers: ToolServerOptions


class ServeRole:
    """Takes the place of ``serve``'s own server, as the context's ``obj``, once all options are
    checked.
    """

    def take(self, checked: CheckedOptions) -> None:
        """Take the options."""
        raise NotImplementedError


class OptionCheck(ServeRole):
    """Keeps the settings of ``treadle.load`` that options of a preset mean, and serves nothing."""

    def __init__(self) -> None:
        self.loading: dict[str, Any] = {}

    def take(self, checked: CheckedOptions) -> None:
        """Keep the settings."""
        self.loading = checked.loading


def engine_args(context: click.Context) -> list[str]:
    """Return the arguments of the command line that each engine gets."""
    given: list[str] = context.meta.get(ARGS, [])
    values, _, order = context.command.make_parser(context).parse_args(args=[*given])
    result: list[str] = []
    for param in dict.fromkeys(order):
        if is_engines(param) or param.name in PASSED_ON:
            result += written(param, values[param.name])
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if source is not click.core.ParameterSource.ENVIRONMENT:
            continue
        if is_engines(param) or param.name in PASSED_ON:
            value: Any = param.value_from_envvar(context)
            if getattr(param, "is_flag", False):
                value = click.BOOL.convert(value, param, context)
            result += written(param, value)
    return result


def is_engines(param: click.Parameter) -> bool:
    """Return whether an option is an engine's: one of the load, of answers, or of sampling."""
    return isinstance(param, SamplingOption) or param.name in OF_ENGINES


def written(param: click.Parameter, value: Any) -> Iterator[str]:
    """Yield an option with its value, as it is typed."""
    long = [name for name in param.opts if name.startswith("--")]
    name = (long or param.opts)[-1]
    if getattr(param, "is_flag", False):
        off = param.secondary_opts
        yield off[-1] if value is False and off else name
        return
    for each in value if isinstance(value, (list, tuple)) else [value]:
        yield f"{name}={each}" if name.startswith("--") else f"{name}{each}"
