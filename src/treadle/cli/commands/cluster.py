"""``treadle cluster``: models on more than one machine, on Ray."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import Any

import click

from treadle.cli.answer_options import default_options, for_other_machines
from treadle.cli.load import find_model, find_projector
from treadle.cli.options import (
    MEDIA_HOSTS,
    MEDIA_URLS,
    ModelCommand,
    ModelType,
    check_media_hosts,
    media_load_options,
)
from treadle.cli.ui.table import remark
from treadle.system import SYSTEM

NEEDED = ("ray", "starlette", "prometheus_client")


def check_extra() -> None:
    """Raise ClickException if a package that the extra ``treadle[cluster]`` installs is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"a cluster needs {' and '.join(missing)}: pip install 'treadle[cluster]'"
        )


def connect(address: str | None, n_cpus: float) -> None:
    """Connect to the Ray cluster at ``address``; None starts one on this machine, which ends with
    this process. Raises ClickException if the cluster at ``address`` does not answer, or has fewer
    than ``n_cpus`` processors: actors that do not fit would wait forever.
    """
    import logging

    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        most = max(math.ceil(n_cpus), os.cpu_count() or 1)  # if there are fewer, they are shared
        ray.init(include_dashboard=False, num_cpus=most, **quiet)
    else:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise click.ClickException(f"cannot connect to Ray at {address}: {error}") from error
        resources: Any = ray.cluster_resources
        there = resources().get("CPU", 0)
        if there < n_cpus:
            ray.shutdown()
            raise click.ClickException(
                f"Ray at {address} has {there:g} processors, but {n_cpus:g} are needed"
            )


@click.group()
def command() -> None:
    """Serve a model from several machines.

    Every machine needs treadle[cluster], and the model's file at the same path.
    """


@command.command(cls=ModelCommand)
@click.argument("model", required=False, type=ModelType())
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Ray cluster: auto, or ray://HOST:PORT. By default one on this machine.",
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Copies of the model; each uses --threads processors.",
)
@click.option(
    "--stages",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Pipeline stages of each copy; each uses --threads processors.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Port to listen on.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="TREADLE_API_KEY",
    help="API key that clients must send; may be repeated.",
)
@click.option("--alias", metavar="NAME", help="The model's name; by default the file's.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that clients may use for this machine; may be repeated.",
)
@click.option(
    "--sequences",
    default=4,
    show_default=True,
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Size of each replica's KV cache in full contexts.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Bit-identical answers, whatever else is in the batch or the cache; slower.",
)
@MEDIA_URLS
@MEDIA_HOSTS
@default_options
@media_load_options
def serve(
    model: str | None,
    address: str | None,
    replicas: int,
    stages: int,
    host: str,
    port: int,
    sequences: int,
    deterministic: bool,
    load: dict[str, Any],
    defaults: dict[str, Any],
    **settings: Any,
) -> None:
    """Serve replicas of MODEL at one address, over HTTP.

    Requests with the same prefix go to the replica that has it cached, unless that one is busier
    than the others. The address is printed on standard output when the server is ready.
    """
    if not all(key.strip() for key in settings["api_keys"]):
        raise click.UsageError("--api-key: the key is empty")
    check_media_hosts(settings["media_urls"], settings["media_hosts"])
    if stages > 1 and isinstance(load["mmproj"], str):
        raise click.UsageError("--mmproj: a model in --stages reads text only")
    check_extra()
    with_model = None if load["mmproj"] is None and stages == 1 else False
    path = None if model is None else str(find_model(model, projector=with_model).absolute())
    if isinstance(load["mmproj"], str):
        load["mmproj"] = str(find_projector(load["mmproj"]).absolute())

    import ray
    from ray import serve as ray_serve

    from treadle.distributed.cluster.plan import ReplicaPlan
    from treadle.distributed.cluster.serving import run
    from treadle.server.requests.service import ServerSettings

    load |= for_other_machines(defaults)
    own = {**load, "n_sequences": sequences, "deterministic": deterministic}
    own = {name: value for name, value in own.items() if value is not None}
    plan = ReplicaPlan(path, replicas, stages, own, ServerSettings(hosts=(host,), **settings))
    connect(address, plan.n_cpus)

    def ready(url: str) -> None:
        remark(f"{replicas} replicas of {stages} stages with {plan.threads} threads are ready")
        click.echo(url)

    try:
        run(plan, host, port, ready)
        SYSTEM.wait_for_end()
    finally:
        ending: Any = ray_serve.shutdown
        ending()
        ray.shutdown()
