"""``treadle bundle``: program and model in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from treadle.base.humanize import n_bytes
from treadle.cli.load import find_model
from treadle.cli.options import ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import printable, remark, show

MACHINES = ("x86_64", "aarch64")
MINORS = tuple(f"3.{minor}" for minor in range(10, 15))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model", type=ModelType())
@click.argument("out", type=click.Path(readable=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option("--serve", is_flag=True, help="OUT starts the server instead of a chat.")
@click.option(
    "--offline",
    is_flag=True,
    help="Download nothing: OUT runs only on this kind of machine and this Python version.",
)
@click.option(
    "--machine",
    "machines",
    multiple=True,
    type=click.Choice(MACHINES),
    help="CPU architecture that OUT runs on (Linux); may be repeated. By default all.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    type=click.Choice(MINORS),
    help="Python version that OUT runs with; may be repeated. By default all.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    out: str,
    args: tuple[str, ...],
    serve: bool,
    offline: bool,
    machines: tuple[str, ...],
    pythons: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write MODEL and treadle as one executable file, OUT, that needs only Python.

    OUT takes the arguments of a command (OUT run, OUT bench) and uses its own MODEL. Without
    arguments it starts a chat; with a prompt alone, it completes that. ARGS are its default
    arguments.
    """
    from treadle.bundle.build import make_bundle
    from treadle.bundle.wheels import Target

    if not out:
        raise click.UsageError("OUT is empty")
    if offline and (machines or pythons):
        raise click.UsageError(
            "--offline excludes --machine and --python: OUT then runs on this kind of machine only"
        )
    versions = [tuple(map(int, version.split("."))) for version in pythons or MINORS]
    targets = [Target(machine, (v[0], v[1])) for machine in machines or MACHINES for v in versions]
    with ProgressBar() as progress:
        path = find_model(model, progress)
        made = make_bundle(
            path,
            Path(out),
            serve=serve,
            args=args,
            targets=[] if offline else targets,
            force=force,
            say=remark,
        )
    report = {**asdict(made), "path": str(made.path), "targets": [*map(str, made.targets)]}

    def told(_: dict[str, object]) -> None:
        parts = f"{n_bytes(made.model_bytes)} model, {n_bytes(made.program_bytes)} program"
        print(f"{printable(str(made.path))}: {n_bytes(made.n_bytes)} ({parts})")

    show(report, as_json, told)
