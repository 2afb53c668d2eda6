"""The options of ``treadle serve`` that apply to one model's engine: a router passes them on to its
engine processes, and a file of presets may set them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from treadle.base.fast_classes import dataclass
from treadle.cli.options import ModelCommand, SamplingOption

if TYPE_CHECKING:
    from treadle.cli.tool_servers import ToolServerOptions
    from treadle.server.requests.service import ServerSettings

ARGS = "treadle.serve.args"  # key in click's ``meta``: the command's arguments
# Parameters of ``serve`` that apply to one model's engine, and may be set in a preset.
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
# Options of the server's access that each engine must have too.
PASSED_ON = frozenset(("log", "log_text", "metrics", "props"))


class ServeCommand(ModelCommand):
    """The command ``serve``; keeps its unparsed arguments in ``ctx.meta`` for ``engine_args``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args``, and keep them in ``ctx.meta``; return those left over. Raises
        click.UsageError for invalid ones.
        """
        ctx.meta[ARGS] = [*args]
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class CheckedOptions:
    """The options of ``serve`` after their checks.

    models: the MODEL arguments. loading: keyword arguments of ``treadle.load``. settings: of the
    HTTP server; its MCP servers are started later, from ``tool_servers``.
    """

    models: Sequence[str]
    loading: dict[str, Any]
    settings: ServerSettings
    tool_servers: ToolServerOptions


class ServeRole:
    """Replaces the end of ``serve``: if click's ``ctx.obj`` is one, ``serve`` checks its options,
    calls ``take`` and returns, without loading or serving anything itself.
    """

    def take(self, checked: CheckedOptions) -> None:
        """Use the checked options in place of serving: called by ``serve``, which then returns."""
        raise NotImplementedError


class OptionCheck(ServeRole):
    """Checks options of ``serve`` and keeps the keyword arguments of ``treadle.load`` that they
    mean, for presets; serves nothing.
    """

    def __init__(self) -> None:
        self.loading: dict[str, Any] = {}

    def take(self, checked: CheckedOptions) -> None:
        """Keep the keyword arguments of ``treadle.load`` in ``loading``."""
        self.loading = checked.loading


def engine_args(context: click.Context) -> list[str]:
    """Return the part of the command line, and of the environment's options, that a router passes
    to each engine, as arguments.
    """
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
    """Return whether an option applies to one model's engine: loading, defaults of answers,
    sampling.
    """
    return isinstance(param, SamplingOption) or param.name in OF_ENGINES


def written(param: click.Parameter, value: Any) -> Iterator[str]:
    """Yield an option and its value as command-line arguments, one for each value."""
    long = [name for name in param.opts if name.startswith("--")]
    name = (long or param.opts)[-1]
    if getattr(param, "is_flag", False):
        off = param.secondary_opts
        yield off[-1] if value is False and off else name
        return
    for each in value if isinstance(value, (list, tuple)) else [value]:
        yield f"{name}={each}" if name.startswith("--") else f"{name}{each}"
