"""``treadle serve`` with several models: the router's options, and its start.

Each engine gets the options for models as they were typed: see ``engine_options.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.engine_options import engine_args
from treadle.cli.options import Number, packed
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.server.requests.service import ServerSettings
    from treadle.server.router.model_list import EngineOptions, ModelList
    from treadle.server.router.served_model import ServedModel

SOURCES = ("models_dir", "presets", "library")  # options that bring models
MEMORY_SHARE = 0.8  # of this machine's memory, for all models by default
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
    """Raise click.UsageError for options in ``router`` (values by name) that have no meaning with
    one model.
    """
    given = [name for name in ("memory", "models_max", "idle_unload") if router[name] is not None]
    if not router["models_autoload"]:
        given.append("no_models_autoload")
    for name in given:
        raise click.UsageError(
            f"--{name.replace('_', '-')} is for several models: name them, or --models-dir, "
            "--presets or --library"
        )


def serve_models(
    models: Sequence[str],
    context: click.Context,
    router: dict[str, Any],
    loading: dict[str, Any],
    settings: ServerSettings,
    port: int,
    grace_s: float,
) -> None:
    """Serve several models, until the server is stopped. ``context``: of the command ``serve``;
    ``router``: values of the router's options; ``loading``: keyword arguments of ``treadle.load``
    from its options; ``grace_s``: seconds that running requests get to finish at the end. Raises
    click.UsageError and TreadleError for options that are invalid.
    """
    from treadle.base.humanize import counted
    from treadle.cli.ui.table import remark
    from treadle.server.router.serve import serve_router
    from treadle.server.router.service import RouterSettings

    if settings.alias is not None:
        raise click.UsageError("--alias names one model: use aliases in a file of --presets")
    args = engine_args(context)
    listed = model_list(models, context.command, args, loading, router, settings.log)
    own = RouterSettings(
        memory=router["memory"] << 20 if router["memory"] else default_memory(),
        idle_s=router["idle_unload"] or math.inf,
        most_loaded=router["models_max"],
        library=router["library"],
        autoload=router["models_autoload"],
    )

    def ready(url: str) -> None:
        n = counted(len(listed.models), "model")
        remark(f"{n}: {short_list(listed)}; each is loaded when asked")
        click.echo(url)

    serve_router(listed, settings, own, port, grace_s, ready)


def short_list(models: ModelList) -> str:
    """Return the names of the first ten models, as text."""
    from treadle.base.humanize import listed

    return listed([model.name for model in models.models], 10) or "none yet"


def default_memory() -> int | None:
    """Return the default bytes for all models together: MEMORY_SHARE of this machine's memory, or
    of the process's limit; None if the system does not tell.
    """
    from treadle.machine.memory import memory_bounds

    bounds = memory_bounds()
    return int(MEMORY_SHARE * min(b.limit_bytes for b in bounds)) if bounds else None


def model_list(
    models: Sequence[str],
    command: click.Command,
    args: Sequence[str],
    loading: dict[str, Any],
    router: dict[str, Any],
    logs: bool = True,
) -> ModelList:
    """Return the models of the command line (``models``), the presets, the folders and the library.
    ``args``: options for engines, ``loading``: what they mean for ``treadle.load``; ``router``:
    values of the router's options; ``logs``: log warnings about files of models. Raises
    TreadleError for a model that is missing, and for two of one name.
    """
    from difflib import get_close_matches

    from treadle.base.caller_warnings import warn
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
    found = ModelList([*fixed, *whole], scans, copies, logs=logs)
    for name in lone:
        if found.get(name) is None:
            near = get_close_matches(name, [model.name for model in found.models], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warn(f"{path}: models.{name}: no model has this name yet{hint}")
    return found


def from_command_line(ref: str, options: EngineOptions) -> ServedModel:
    """Return the model of the argument ``ref``, with the engines' ``options``. Raises TreadleError
    if there is none.
    """
    from treadle.cli.load import find_model
    from treadle.server.router.model_list import file_stem

    if ref.startswith("hf:"):
        return options.applied(ref.removeprefix("hf:"), ref, "the command line")
    from treadle.catalog.stored import stored_at

    path = find_model(ref)
    return options.applied(file_stem(stored_at(path)), str(path), "the command line")
