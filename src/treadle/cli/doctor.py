"""``treadle doctor``: what this machine can do, and what holds it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from treadle.cli.table import print_json, printable


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Tell what this machine can do: CPU, threads and why, bandwidth, peak rates, fallbacks."""
    from treadle.cli.progress import ProgressBar
    from treadle.runtime import machine

    with ProgressBar() as progress:
        report = machine.describe(progress=progress)
    if as_json:
        print_json(report)
        return
    for line in render(report):
        print(line)


def render(report: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """Write a report, a mapping of mappings, lists and values, as indented lines."""
    width = max((len(key) for key in report), default=0)
    for key, value in report.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}"
            yield from render(value, indent + "  ")
        elif isinstance(value, (list, tuple)) and any(len(str(item)) > 24 for item in value):
            yield f"{indent}{key}"
            yield from (f"{indent}  {printable(str(item))}" for item in value)
        else:
            yield f"{indent}{key:<{width}}  {printable(written(value))}".rstrip()


def written(value: object) -> str:
    """Write one value as a person would."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
