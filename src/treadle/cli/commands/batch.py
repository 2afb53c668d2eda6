"""``treadle batch``: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import TYPE_CHECKING, Any

import click

from treadle.base.validate import file_name
from treadle.cli.answer_options import default_options, for_other_machines
from treadle.cli.load import find_model, find_projector, load_model
from treadle.cli.options import (
    MEDIA_HOSTS,
    MEDIA_URLS,
    ModelCommand,
    check_media_hosts,
    media_load_options,
)
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import remark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from treadle.server.batch_file.lines import InputLine
    from treadle.server.batch_file.work import OutputLine
    from treadle.server.requests.service import ServerSettings

REPORT_S = 10.0  # seconds between two lines of progress, if there is no progress bar


class JobProgress:
    """Counts of a batch job, shown on standard error: on the progress bar or, without a terminal,
    as a line every 10 s. ``total``: lines of the input, 0 if unknown; ``n_earlier``: lines that an
    earlier run has written.
    """

    def __init__(self, total: int, n_earlier: int, progress: ProgressBar) -> None:
        self.total = total
        self.n_lines = n_earlier
        self.n_failed = 0
        self.n_tokens = 0
        self._bar, self._began = progress, time.monotonic()
        self._last = self._began

    def note(self, written: OutputLine) -> None:
        """Add one output line to the counts, and show them."""
        self.n_lines += 1
        self.n_failed += written.failed
        self.n_tokens += written.n_tokens
        self._bar.note = f"{self.n_failed} failed" if self.n_failed else ""
        self._bar("lines", self.n_lines, self.total)
        if not self._bar.enabled and time.monotonic() - self._last > REPORT_S:
            self._last = time.monotonic()
            remark(self.summary())

    def summary(self) -> str:
        """Format the counts so far."""
        of = f" of {self.total}" if self.total else ""
        seconds = time.monotonic() - self._began
        return (
            f"{self.n_lines}{of} lines written, {self.n_failed} of them failed; "
            f"{self.n_tokens} tokens in {seconds:.1f} s"
        )


@click.command(cls=ModelCommand)
@click.argument("source", metavar="IN", type=click.Path(allow_dash=True))
@click.argument("target", metavar="OUT", type=click.Path(allow_dash=True))
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="The model; by default the small one that ships with treadle.",
)
@click.option("--alias", metavar="NAME", help="The model's name in answers; by default the file's.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Token limit of answers whose line has none.",
)
@click.option(
    "--sequences",
    type=click.IntRange(1, 4096),
    metavar="N",
    default=8,
    show_default=True,
    help="Size of the KV cache in full contexts; shorter requests share it.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Bit-identical answers, whatever else is in the batch or the cache; slower.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help='Use several copies of the model, on the Ray cluster at ADDRESS; "local" starts one '
    "on this machine.",
)
@click.option(
    "--replicas",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Copies of the model, with --cluster; each uses --threads processors.",
)
@MEDIA_URLS
@MEDIA_HOSTS
@default_options
@media_load_options
def command(
    source: str,
    target: str,
    model: str | None,
    alias: str | None,
    max_tokens: int | None,
    sequences: int,
    deterministic: bool,
    cluster: str | None,
    replicas: int,
    media_urls: bool,
    media_hosts: tuple[str, ...],
    load: dict[str, Any],
    defaults: dict[str, Any],
) -> None:
    """Answer the requests in IN, a JSON object on each line, and write the answers to OUT.

    A line is in OpenAI's batch format (custom_id, method, url, body), or simply an object with
    "prompt" or "messages". Line n of OUT answers line n of IN; if that is not possible, it has an
    error. After Ctrl-C or a crash, run the same command again: it continues where OUT ends. "-" is
    standard input or output. The options for chat template, reasoning, sampling and seed apply to
    lines that do not set them.
    """
    from treadle.server.batch_file.lines import read_lines
    from treadle.server.batch_file.output import Output, check_apart, open_input
    from treadle.server.requests.service import ServerSettings

    if replicas != 1 and cluster is None:
        raise click.UsageError("--replicas needs --cluster")
    check_media_hosts(media_urls, media_hosts)
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    load |= {"deterministic": deterministic, "n_sequences": sequences, **defaults}
    settings = ServerSettings(
        alias=alias,
        max_requests=4096,
        max_queue_s=math.inf,
        log=False,
        media_urls=media_urls,
        media_hosts=media_hosts,
    )
    for name in (source, target):
        file_name(name)  # raises for an empty one
    file = open_input(source)
    check_apart(source, target)
    total = count_lines(source)
    output = Output(target)
    try:
        lines = read_lines(file)
        output.skip(lines)
        if total and output.n_earlier == total:
            remark(f"{target} has all {total} lines already")
            return
        if output.n_earlier:
            remark(f"{target} has {output.n_earlier} lines already: continuing after them")
        with ProgressBar(metered="lines", unit="lines") as progress:
            told = JobProgress(total, output.n_earlier, progress)

            def write(written: OutputLine) -> None:
                output.append(written.data)
                told.note(written)

            try:
                if cluster is None:
                    answer_locally(lines, write, model, fields, settings, progress, load)
                else:
                    answer_on_cluster(
                        lines, write, model, fields, settings, cluster, replicas, load
                    )
            except KeyboardInterrupt:
                progress.close()
                remark(f"{told.summary()}; run the same command again to continue")
                raise
            progress.close()
            remark(told.summary())
    finally:
        output.close()
        file.close()


def answer_locally(
    lines: Iterator[InputLine],
    write: Callable[[OutputLine], None],
    model: str | None,
    fields: dict[str, Any],
    settings: ServerSettings,
    progress: ProgressBar,
    load: dict[str, Any],
) -> None:
    """Answer ``lines`` with a model in this process; ``write`` gets each output line. ``model``:
    MODEL, None for the one inside the package; ``fields``: request fields for lines that lack them;
    ``load``: keyword arguments of ``load_model``.
    """
    from treadle.server.batch_file.local import LocalAnswers
    from treadle.server.batch_file.work import work
    from treadle.server.requests.service import Service

    async def run() -> None:
        await local.ready()
        progress.close()
        await work(lines, local.answer, write)

    with load_model(model, progress, **load) as loaded:
        service = Service(loaded, settings)
        local = LocalAnswers(service, fields)
        try:
            asyncio.run(run())
        finally:
            service.close()


def answer_on_cluster(
    lines: Iterator[InputLine],
    write: Callable[[OutputLine], None],
    model: str | None,
    fields: dict[str, Any],
    settings: ServerSettings,
    address: str,
    replicas: int,
    load: dict[str, Any],
) -> None:
    """Answer ``lines`` with ``replicas`` of the model on the Ray cluster at ``address`` ("local"
    starts one); ``write`` gets each output line. ``model``, ``fields`` and ``load``: as for
    ``answer_locally``.
    """
    from treadle.cli.commands.cluster import check_extra, connect

    check_extra()
    with_model = None if load["mmproj"] is None else False
    path = None if model is None else str(find_model(model, projector=with_model).absolute())

    import ray

    from treadle.distributed.cluster.data import answers
    from treadle.distributed.cluster.plan import ReplicaPlan

    load = for_other_machines(load)
    if isinstance(load["mmproj"], str):
        load["mmproj"] = str(find_projector(load["mmproj"]).absolute())
    own = {name: value for name, value in load.items() if value is not None}
    plan = ReplicaPlan(path, replicas, 1, own, settings)
    connect(None if address == "local" else address, plan.n_cpus)
    try:
        for written in answers(lines, plan, fields):
            write(written)
    finally:
        ray.shutdown()


def count_lines(path: str) -> int:
    """Return the number of lines that are not blank; 0 for standard input and pipes, which can be
    read only once.
    """
    if path == "-" or not os.path.isfile(path):
        return 0
    with open(path, "rb") as file:
        return sum(not raw.isspace() for raw in file)
