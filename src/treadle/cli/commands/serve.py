"""``treadle serve``: a model over HTTP."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.humanize import listed, n_bytes
from treadle.cli.answer_options import MAX_TOKENS, default_options
from treadle.cli.door_options import check_files, door_options
from treadle.cli.engine_options import CheckedOptions, ServeCommand, ServeRole
from treadle.cli.load import device_name, load_model, warn_of_template
from treadle.cli.options import (
    MEDIA_HOSTS,
    MEDIA_URLS,
    ModelType,
    Number,
    check_media_hosts,
    writing_load_options,
)
from treadle.cli.router import SOURCES, check_alone, router_options, serve_models
from treadle.cli.speech import left_out, load_recognizer, speech_model_path
from treadle.cli.tool_servers import ToolServerOptions, tell_servers, tool_server_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import remark
from treadle.files.splits import shown_name

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.server.requests.service import ServerSettings

MOST_SEQUENCES = 128  # if --kv-mib bounds the cache
# Default KV cache of all sequences: agents' prompts have 6,000 to 21,000 tokens. It is at most a
# quarter of the free memory, or SHARED_BYTES if that is more.
SHARED_TOKENS = 32768
SHARED_BYTES = 256 << 20
NEEDED = ("starlette", "uvicorn", "prometheus_client")


def origin(text: str) -> str:
    """Return a web page's origin after checking it: ``https://example.org``, as browsers send it,
    "*" or "null". Raises click.BadParameter for anything else.
    """
    if text not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", text):
        raise click.BadParameter(f"{text!r}: expected https://NAME, without a path, or *")
    return text


@click.command(cls=ServeCommand)
@click.argument("models", metavar="[MODEL]...", nargs=-1, type=ModelType())
@router_options
@click.option(
    "--host",
    "hosts",
    multiple=True,
    default=("127.0.0.1",),
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 for the whole network, unix:PATH for a UNIX socket; may be "
    "repeated.",
)
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="TREADLE_API_KEY",
    help="API key that clients must send; may be repeated. The variable TREADLE_API_KEY keeps it "
    "out of the list of processes.",
)
@door_options
@click.option("--alias", metavar="NAME", help="The model's name; by default the file's.")
@click.option("--n-ctx", "n_ctx", type=click.IntRange(1), metavar="N", help="Same as -c.")
@click.option(
    "--sequences",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Size of the KV cache in full contexts, by default 4; shorter requests share it. Without "
    "this, -c and --kv-mib the cache has 32768 tokens, and one request may use all of them.",
)
@click.option(
    "--max-requests",
    default=512,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Requests accepted at once, queued ones included; more get a 503.",
)
@click.option(
    "--max-queue",
    "max_queue_s",
    default=300.0,
    show_default=True,
    metavar="S",
    type=Number(0, min_open=True),
    help="Seconds of prompt processing that may be queued; further requests get a 503.",
)
@click.option(
    "--grace",
    default=10.0,
    show_default=True,
    type=Number(0, 3600),
    metavar="S",
    help="Seconds that running requests get to finish when the server stops.",
)
@click.option("--metrics/--no-metrics", default=False, help="Serve /metrics for Prometheus.")
@click.option(
    "--log/--no-log", default=True, help="Write one line of JSON per request to standard error."
)
@click.option("--log-text", is_flag=True, help="Include prompts and answers in the log.")
@click.option("--page/--no-page", default=True, help="Serve a chat page at /.")
@click.option(
    "--slot-save-path",
    metavar="DIR",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Let clients save and restore slots in files of DIR (llama.cpp's /slots); DIR is created "
    "if it is missing.",
)
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that clients may use for this machine; may be repeated.",
)
@click.option(
    "--allow-origin",
    "allow_origins",
    multiple=True,
    metavar="ORIGIN",
    type=origin,
    help="Origin of web pages that may call the server (https://example.org); may be repeated.",
)
@MEDIA_URLS
@MEDIA_HOSTS
@click.option(
    "--deterministic",
    is_flag=True,
    help="Bit-identical answers, whatever else is in the batch or the cache; slower.",
)
@MAX_TOKENS
@tool_server_options
@default_options
@writing_load_options
def command(
    models: tuple[str, ...],
    hosts: tuple[str, ...],
    port: int,
    alias: str | None,
    n_ctx: int | None,
    sequences: int | None,
    grace: float,
    deterministic: bool,
    max_tokens: int | None,
    load: dict[str, Any],
    defaults: dict[str, Any],
    router: dict[str, Any],
    tool_servers: ToolServerOptions,
    **settings: Any,
) -> None:
    """Serve MODEL over HTTP, for clients of OpenAI, Anthropic, Ollama and llama.cpp.

    The address is printed on standard output, alone on its line, when the server is ready. In a
    browser it shows a chat page. Without MODEL, the small model that ships with treadle is served.
    Of several MODELs, and those of --models-dir, --presets and --library, a request names one,
    which is then loaded; options for models hold for each of them.
    The options for chat template, reasoning, sampling and seed are defaults: a request's own fields
    override them.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the server needs {' and '.join(missing)}: pip install 'treadle[serve]'"
        )
    hosts = tuple(host.strip() for each in hosts for host in each.split(","))
    if not all(hosts):
        raise click.UsageError("--host: expected an address, such as 127.0.0.1")
    if not all(key.strip() for key in settings["api_keys"]):
        raise click.UsageError("--api-key: the key is empty")
    if n_ctx is not None and load["context"] not in (None, n_ctx):
        raise click.UsageError(
            f"-c {load['context']} and --n-ctx {n_ctx}: they are the same option"
        )
    if settings["log_text"] and not settings["log"]:
        raise click.UsageError("--log-text and --no-log: choose one")
    check_media_hosts(settings["media_urls"], settings["media_hosts"])
    check_files(settings)
    make_folder(settings["slot_save_path"])
    load["context"] = load["context"] or n_ctx
    load["n_sequences"] = sequences or (MOST_SEQUENCES if load["kv_bytes"] else 4)
    if not (load["context"] or sequences or load["kv_bytes"]):
        load |= shared_room()
    loading = {"deterministic": deterministic, "max_tokens": max_tokens, **load, **defaults}
    from treadle.server.requests.service import ServerSettings

    own = ServerSettings(alias=alias, hosts=hosts, **settings)
    context = click.get_current_context()
    if isinstance(context.obj, ServeRole):  # an engine of a router, or a preset's check
        return context.obj.take(CheckedOptions(models, loading, own, tool_servers))
    if len(models) > 1 or any(router[name] for name in SOURCES):
        return serve_models(models, context, router, loading, own, port, grace)
    check_alone(router)
    model = models[0] if models else None
    with ProgressBar() as progress:
        if model is not None and (speech := speech_model_path(model, progress)) is not None:
            if unused := left_out(context):
                remark(f"{shown_name(speech)} is a speech model: {listed(unused, 8)} left out")
            return _serve_speech(speech, progress, own, port, grace, loading)
    toolbox = tool_servers.open()
    own = replace(own, toolbox=toolbox)
    with ProgressBar() as progress:
        loaded = load_model(model, progress, **loading)
        warn_of_template(loaded, progress)

    from treadle.server.serve import serve

    def ready(url: str) -> None:
        progress.close()
        pages = n_bytes(loaded.engine.cache.n_bytes)
        remark(
            f"{loaded.path.name} is ready: {device_name(loaded) or f'{loaded.n_threads} threads'}, "
            f"up to {min(loaded.n_ctx, loaded.engine.cache.n_tokens)} tokens per request, "
            f"{pages} of KV cache{_senses(loaded)}"
        )
        if toolbox is not None:
            tell_servers(toolbox, remark)
        click.echo(url)

    with loaded, toolbox or nullcontext():
        serve(loaded, own, port, grace, ready)


def _serve_speech(
    path: Path,
    progress: ProgressBar,
    settings: ServerSettings,
    port: int,
    grace_s: float,
    loading: dict[str, Any],
) -> None:
    """Load and serve a speech model until the server is stopped. ``grace_s``: seconds that running
    requests then get to finish; ``loading``: keyword arguments of ``treadle.load``.
    """
    from treadle.server.serve import run_service
    from treadle.server.speech.speech_app import build_speech_app
    from treadle.server.speech.speech_service import SpeechService

    with load_recognizer(path, progress, loading) as recognizer:

        def ready(url: str) -> None:
            progress.close()
            n = len(recognizer.languages)
            remark(
                f"{shown_name(path)} is ready: {recognizer.n_threads} threads, transcribes "
                f"{f'{n} languages' if n > 1 else 'English'}: POST /v1/audio/transcriptions"
            )
            click.echo(url)

        service = SpeechService(recognizer, settings)
        run_service(service, build_speech_app, port, grace_s, ready)


def _senses(model: Model) -> str:
    """Return what a model reads besides text, as the end of the line that says it is ready: ``,
    reads pictures``; "" if it reads only text.
    """
    if not model.modalities:
        return ""
    if "image" in model.modalities and find_spec("PIL") is None:
        return ", but no pictures: they need pip install 'treadle[pictures]'"
    from treadle.media.kinds import plurals

    return f", reads {' and '.join(plurals(model.modalities))}"


def make_folder(path: Path | None) -> None:
    """Create the folder of saved slots, if one is given. Raises ClickException if that fails."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise click.ClickException(f"--slot-save-path: cannot create {path}: {why}") from error


def shared_room() -> dict[str, int]:
    """Return the default limits of the KV cache: ``kv_tokens`` is SHARED_TOKENS; ``kv_bytes`` a
    quarter of the free memory, at least SHARED_BYTES, if the system tells how much is free.
    """
    from treadle.machine.memory import usable_memory

    bound = usable_memory()
    most = {"kv_bytes": max(SHARED_BYTES, bound.free_bytes // 4)} if bound else {}
    return {"kv_tokens": SHARED_TOKENS, **most}
