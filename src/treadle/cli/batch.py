"""``treadle batch``: a file of requests to a file of answers."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.load import find_model, load_model
from treadle.cli.options import Number, load_options
from treadle.cli.progress import ProgressBar
from treadle.cli.table import remark
from treadle.files.target import file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from treadle.batchfile.lines import Line
    from treadle.batchfile.work import Written
    from treadle.server.service import Settings

TOLD_S = 10.0  # seconds between two lines of progress, where nobody watches a bar


class Told:
    """How far a job is, on standard error."""

    def __init__(self, total: int, n_earlier: int, progress: ProgressBar) -> None:
        self.total, self.n_lines, self.n_failed, self.n_tokens = total, n_earlier, 0, 0
        self._bar, self._began = progress, time.monotonic()
        self._last = self._began

    def note(self, written: Written) -> None:
        """One line more."""
        self.n_lines += 1
        self.n_failed += written.failed
        self.n_tokens += written.n_tokens
        self._bar.note = f"{self.n_failed} failed" if self.n_failed else ""
        self._bar("lines", self.n_lines, self.total)
        if not self._bar.wanted and time.monotonic() - self._last > TOLD_S:
            self._last = time.monotonic()
            remark(self.summary())

    def summary(self) -> str:
        """What is written so far."""
        of = f" of {self.total}" if self.total else ""
        seconds = time.monotonic() - self._began
        return (
            f"{self.n_lines}{of} lines written, {self.n_failed} of them failed; "
            f"{self.n_tokens} tokens in {seconds:.1f} s"
        )


@click.command()
@click.argument("source", metavar="IN", type=click.Path(allow_dash=True))
@click.argument("target", metavar="OUT", type=click.Path(allow_dash=True))
@click.option(
    "-m", "--model", metavar="MODEL", help="By default the small model inside the package."
)
@click.option("--alias", metavar="NAME", help="The model's name in answers; by default the file's.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(1), metavar="N",
    help="Tokens of an answer, for lines that do not say.",
)  # fmt: skip
@click.option("--temp", type=Number(0), metavar="T", help="Temperature, for lines without one.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed, for lines without one.")
@click.option(
    "--sequences", type=click.IntRange(1, 4096), metavar="N", default=8, show_default=True,
    help="Room for so many full contexts; shorter texts share it, more of them at once.",
)  # fmt: skip
@click.option(
    "--deterministic", is_flag=True,
    help="An answer is the same to the bit beside others as alone, and whatever is cached; slower.",
)  # fmt: skip
@click.option(
    "--cluster", metavar="ADDRESS",
    help="Have several models answer, on the Ray at ADDRESS; \"local\" is one on this machine.",
)  # fmt: skip
@click.option(
    "--replicas", default=1, show_default=True, type=click.IntRange(1, 1024), metavar="N",
    help="Models, with --cluster; each with --threads processors.",
)  # fmt: skip
@load_options
def command(
    source: str,
    target: str,
    model: str | None,
    alias: str | None,
    max_tokens: int | None,
    temp: float | None,
    seed: int | None,
    sequences: int,
    deterministic: bool,
    cluster: str | None,
    replicas: int,
    load: dict[str, Any],
) -> None:
    """Answer the requests in IN, a JSON object on each line, and write the answers to OUT.

    A line is one of OpenAI's batch files (custom_id, method, url, body), or simply an object with
    "prompt" or "messages". The n-th line of OUT answers the n-th line of IN; a line that cannot be
    answered says why. After Ctrl-C, or any other end, the same command goes on where OUT ends.
    "-" is standard input or output.
    """
    from treadle.batchfile.lines import read_lines
    from treadle.batchfile.output import Output, check_apart, open_input
    from treadle.server.service import Settings

    if replicas != 1 and cluster is None:
        raise click.UsageError("--replicas: is for --cluster, which is missing")
    given = {"max_tokens": max_tokens, "temperature": temp, "seed": seed}
    defaults = {name: value for name, value in given.items() if value is not None}
    load |= {"deterministic": deterministic, "n_sequences": sequences}
    settings = Settings(alias=alias, max_requests=4096, max_queue_s=math.inf, log=False)
    for name in (source, target):
        file_name(name)  # which is not empty
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
            remark(f"{target} has {output.n_earlier} lines already: going on behind them")
        with ProgressBar(metered="lines", unit="lines") as progress:
            told = Told(total, output.n_earlier, progress)

            def write(written: Written) -> None:
                output.append(written.data)
                told.note(written)

            try:
                if cluster is None:
                    answer_here(lines, write, model, defaults, settings, progress, load)
                else:
                    answer_there(lines, write, model, defaults, settings, cluster, replicas, load)
            except KeyboardInterrupt:
                progress.close()
                remark(f"{told.summary()}; the same command goes on")
                raise
            progress.close()
            remark(told.summary())
    finally:
        output.close()
        file.close()


def answer_here(
    lines: Iterator[Line],
    write: Callable[[Written], None],
    model: str | None,
    defaults: dict[str, Any],
    settings: Settings,
    progress: ProgressBar,
    load: dict[str, Any],
) -> None:
    """By a model in this process."""
    from treadle.batchfile.local import Local
    from treadle.batchfile.work import work
    from treadle.server.service import Service

    async def run() -> None:
        await local.ready()
        progress.close()
        await work(lines, local.answer, write)

    with load_model(model, progress, **load) as loaded:
        service = Service(loaded, settings)
        local = Local(service, defaults)
        try:
            asyncio.run(run())
        finally:
            service.close()


def answer_there(
    lines: Iterator[Line],
    write: Callable[[Written], None],
    model: str | None,
    defaults: dict[str, Any],
    settings: Settings,
    address: str,
    replicas: int,
    load: dict[str, Any],
) -> None:
    """By models on a cluster."""
    from treadle.cli.cluster import check_extra, connect

    check_extra()
    path = None if model is None else str(find_model(model).resolve())

    import ray

    from treadle.cluster.data import answers
    from treadle.cluster.plan import Plan

    own = {name: value for name, value in load.items() if value is not None}
    plan = Plan(path, replicas, 1, own, settings)
    connect(None if address == "local" else address, plan.n_cpus)
    try:
        for written in answers(lines, plan, defaults):
            write(written)
    finally:
        ray.shutdown()


def count_lines(path: str) -> int:
    """Lines with something on them; 0 where that cannot be known beforehand."""
    if path == "-" or not os.path.isfile(path):
        return 0
    with open(path, "rb") as file:
        return sum(not raw.isspace() for raw in file)
