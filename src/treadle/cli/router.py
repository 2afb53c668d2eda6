"""``treadle serve`` with several models: its options, and the start of the router.

Options for models go to each engine as they were typed: an engine is ``treadle serve`` of one
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.options import ModelCommand, Number, packed
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.server.requests.service import ServerSettings
    from treadle.server.router.model_list import EngineOptions, ModelList
    from treadle.server.router.served_model import ServedModel

ARGS = "treadle.serve.args"  # key in click's ``meta``: the command's arguments
SOURCES = ("models_dir", "presets", "library")  # options that bring models
MEMORY_SHARE = 0.8  # of this machine's memory, for all models by default
# Parameters of ``serve`` that are an engine's, and may stand in a preset.
OF_ENGINES = frozenset(
    (
        *("threads", "context", "n_ctx", "kv", "kv_bytes", "lora", "device", "sequences"),
        *("mmproj", "no_mmproj", "image_max_tokens", "cache_dir", "cache_bytes"),
        *("speculate", "draft", "deterministic", "max_tokens", "max_requests", "max_queue_s"),
        *("chat_template", "chat_template_kwargs", "reasoning", "reasoning_budget"),
        *("reasoning_budget_message", "reasoning_preserve", "strict"),
        *("media_urls", "media_hosts", "slot_save_path"),
    )
)
# Those of the door that each engine must have too.
PASSED_ON = frozenset(("log", "log_text", "metrics"))


class ServeCommand(ModelCommand):
    """The command ``serve``, which keeps its arguments for the engines of a router."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises click.UsageError."""
        ctx.meta[ARGS] = [*args]
        return super().parse_args(ctx, args)


class ServeRole:
    """What takes the place of ``serve``'s own server, as the context's ``obj``, once all options
    are checked.
    """

    def take(
        self, models: Sequence[str], loading: dict[str, Any], settings: ServerSettings
    ) -> None:
        """Take the settings of ``treadle.load`` and of the server."""
        raise NotImplementedError


class OptionCheck(ServeRole):
    """Keeps the settings of ``treadle.load`` that options of a preset mean, and serves nothing."""

    def __init__(self) -> None:
        self.loading: dict[str, Any] = {}

    def take(
        self, models: Sequence[str], loading: dict[str, Any], settings: ServerSettings
    ) -> None:
        """Keep the settings."""
        self.loading = loading


_ROUTER = (
    click.option(
        "--models-dir",
        metavar="DIR",
        multiple=True,
        type=click.Path(file_okay=False, path_type=Path),
        help="Serve the models in DIR and in folders below it, under their files' names; DIR is "
        "followed while it changes. May be repeated.",
    ),
    click.option(
        "--presets",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with models and their options; see docs/router.md.",
    ),
    click.option(
        "--library",
        is_flag=True,
        help="Serve the downloaded models too, and let clients download, remove and copy them.",
    ),
    click.option(
        "--memory",
        metavar="MIB",
        type=click.IntRange(1),
        help="Memory for all loaded models, by default 80 % of this machine's; the least recently "
        "used ones are unloaded to make room.",
    ),
    click.option(
        "--models-max",
        metavar="N",
        type=click.IntRange(1),
        help="Most models that are loaded at once; by default as many as fit into memory.",
    ),
    click.option(
        "--idle-unload",
        metavar="SECONDS",
        type=Number(0, min_open=True),
        help="Unload a model after SECONDS without a request; by default never.",
    ),
    click.option(
        "--models-autoload/--no-models-autoload",
        default=True,
        help="Load a model for the first request that names it (the default), or only on "
        "/models/load.",
    ),
)
_NAMES = ("models_dir", "presets", "library", "memory", "models_max", "idle_unload")
router_options = packed("router", (*_NAMES, "models_autoload"), _ROUTER)


def check_alone(router: dict[str, Any]) -> None:
    """Raise click.UsageError for options that mean nothing with one model."""
    for name in ("memory", "models_max", "idle_unload"):
        if router[name] is not None:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is for several models: name them, or --models-dir, "
                "--presets or --library"
            )


def engine_args(context: click.Context) -> list[str]:
    """Return the arguments of the command line that each engine gets."""
    given: list[str] = context.meta.get(ARGS, [])
    values, _, order = context.command.make_parser(context).parse_args(args=[*given])  # type: ignore[attr-defined]
    result: list[str] = []
    for param in dict.fromkeys(order):
        if is_engines(param) or param.name in PASSED_ON:
            result += written(param, values[param.name])
    return result


def is_engines(param: click.Parameter) -> bool:
    """Return whether an option is an engine's: one of the load, of answers, or of sampling."""
    from treadle.cli.options import SamplingOption

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


def serve_models(
    models: Sequence[str],
    context: click.Context,
    router: dict[str, Any],
    loading: dict[str, Any],
    settings: ServerSettings,
    port: int,
    grace_s: float,
) -> None:
    """Serve several models. Raises click.UsageError and TreadleError."""
    from treadle.cli.ui.table import remark
    from treadle.server.router.serve import serve_router
    from treadle.server.router.service import RouterSettings

    if settings.alias is not None:
        raise click.UsageError("--alias names one model: use aliases in a file of --presets")
    listed = model_list(models, context.command, engine_args(context), loading, router)
    own = RouterSettings(
        memory=router["memory"] << 20 if router["memory"] else default_memory(),
        idle_s=router["idle_unload"] or math.inf,
        most_loaded=router["models_max"],
        library=router["library"],
        autoload=router["models_autoload"],
    )

    def ready(url: str) -> None:
        n = len(listed.models)
        remark(f"{n} model{'' if n == 1 else 's'}: {short_list(listed)}; each is loaded when asked")
        click.echo(url)

    serve_router(listed, settings, own, port, grace_s, ready)


def short_list(models: ModelList) -> str:
    """Return the first names."""
    from treadle.base.humanize import listed

    return listed([model.name for model in models.models], 10) or "none yet"


def default_memory() -> int | None:
    """Return the bytes of memory for all models; None if the system does not tell."""
    from treadle.machine.memory import memory_bounds

    bounds = memory_bounds()
    return int(MEMORY_SHARE * min(b.limit_bytes for b in bounds)) if bounds else None


def model_list(
    models: Sequence[str],
    command: click.Command,
    args: Sequence[str],
    loading: dict[str, Any],
    router: dict[str, Any],
) -> ModelList:
    """Return the models of the command line, of presets, folders and the library. Raises
    TreadleError for what is missing, and for two models of one name.
    """
    from treadle.cli.presets import NO_PRESETS, read_presets
    from treadle.server.router.library import CopiedNames
    from treadle.server.router.model_list import ModelList, scan_folder, scan_library

    path = router["presets"]
    presets = NO_PRESETS if path is None else read_presets(path, command, args)
    options = presets.options(command, args, loading)
    fixed = [from_command_line(ref, options) for ref in models]
    named = {model.name for model in fixed}
    whole = [model for model in presets.models if model.ref]
    scans = [scan_folder(folder, options) for folder in router["models_dir"]]
    if router["library"]:
        scans.append(scan_library(options))
    lone = [name for name in options.settings if name not in named]
    if lone and not scans:
        raise TreadleError(f"{path}: models.{lone[0]}: names no model: expected the key model")
    copies = CopiedNames() if router["library"] else dict
    return ModelList([*fixed, *whole], scans, copies)


def from_command_line(ref: str, options: EngineOptions) -> ServedModel:
    """Return the model of a MODEL argument. Raises TreadleError if there is none."""
    from treadle.cli.load import find_model
    from treadle.server.router.model_list import file_stem

    if ref.startswith("hf:"):
        return options.applied(ref.removeprefix("hf:"), ref, "the command line")
    from treadle.catalog.stored import stored_at

    path = find_model(ref)
    return options.applied(file_stem(stored_at(path)), str(path), "the command line")
