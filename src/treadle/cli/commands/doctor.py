"""``treadle doctor``: the machine's capabilities and limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from treadle.base.humanize import n_bytes, scaled
from treadle.cli.answer_options import CHAT_TEMPLATE, build_defaults
from treadle.cli.options import ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import printable, say, show, terminal_width

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.profiling.facts import ModelFile

LEAST_ROOM = 16  # least columns for values next to their keys
# Formats of numbers by their key's suffix, which is not printed.
UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_s": lambda number: scaled(number, "B/s"),
    "_ops_s": lambda number: scaled(number, "op/s"),
    "_bytes": n_bytes,
    "_share": lambda number: f"{number:.0%}",
}


@click.command()
@click.argument("model", type=ModelType(), required=False)
@click.option(
    "--reload",
    is_flag=True,
    help="First read MODEL from disk again, into 2 MB pages where the system supports them.",
)
@CHAT_TEMPLATE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, reload: bool, chat_template: str | None, as_json: bool) -> None:
    """Report what this machine can do: CPU, thread count and why, bandwidth, peak rates, fallbacks.

    With MODEL, also how much of the file is in memory, the page sizes, and whether treadle has
    kernels for its formats.
    """
    if reload and model is None:
        raise click.UsageError("--reload needs a MODEL")
    if chat_template is not None and model is None:
        raise click.UsageError("--chat-template needs a MODEL")
    build_defaults({"chat_template": chat_template})  # raises click.UsageError for a bad one
    with ProgressBar() as progress:
        report = examine(model, progress, reload=reload, chat_template=chat_template)
    show(report, as_json, print_report)


def examine(
    model: str | None,
    progress: ProgressBar,
    *,
    reload: bool = False,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Return a report on this machine (CPU, threads, peaks, GPU, warnings), with its measured peaks
    if kernels can be compiled, and on MODEL's files if one is given. ``reload``: read these from
    disk again first; ``chat_template``: replaces the model's own.
    """
    from treadle.devices.cpu.residence import reread
    from treadle.devices.cuda.facts import device_properties
    from treadle.devices.wgpu.device import device_properties as wgpu_told
    from treadle.errors import CacheError, CompileError
    from treadle.machine.topology import usable_threads
    from treadle.profiling.facts import Subject
    from treadle.profiling.peaks import measure_peaks
    from treadle.profiling.report import describe, row_in_use

    about = None if model is None else read_model_file(model, progress, chat_template)
    if about is not None and reload:
        for i, path in enumerate(about.files):
            progress("reading", i, len(about.files))
            reread(path)
    peaks = None
    failure = None
    try:
        peaks = measure_peaks(row_in_use(), usable_threads()[0], progress=progress)
    except (CacheError, CompileError) as error:
        failure = str(error)
    report = describe(Subject(about, peaks))
    report["gpu"] = device_properties() | wgpu_told()
    report["warnings"] = report.pop("warnings")  # last in the output
    if failure:
        report["warnings"].append(f"peaks were not measured: {failure}")
    return report


def read_model_file(
    model: str, progress: ProgressBar, chat_template: str | None = None
) -> ModelFile:
    """Return facts about MODEL's files, without reading weights. ``chat_template``: as of
    ``chat_of``.
    """
    from treadle.api.summary import bytes_by_type
    from treadle.cli.load import find_model
    from treadle.convert.open import open_model
    from treadle.errors import TreadleError
    from treadle.formats import FORMATS
    from treadle.models.ignored_tensors import SPEECH
    from treadle.models.load import load_config
    from treadle.profiling.facts import ModelFile
    from treadle.speech.read import read_parts

    with open_model(find_model(model, progress)) as gguf:
        problem = None
        is_speech = gguf.metadata.get("general.architecture") in SPEECH
        try:
            if is_speech:
                read_parts(gguf)
            else:
                load_config(gguf)
        except TreadleError as error:
            problem = str(error)
        tensors = list(gguf.tensors.values())
        formats = list(bytes_by_type(tensors))
        lacking = {tensor.type_name for tensor in tensors if tensor.format is None}
        return ModelFile(
            # a Hugging Face folder's path is not a file; its tensors have their own
            files=sorted(p for p in {t.path for t in tensors} | {gguf.path} if p.is_file()),
            formats=formats,
            without_kernel=[name for name in formats if name in lacking],
            acts={t.format.act for t in tensors if t.format and len(t.shape) > 1},
            instead=[row.name for row in FORMATS.values()],
            problem=problem,
            chat=None if problem or is_speech else chat_of(gguf, chat_template),
        )


def chat_of(gguf: GGUF, chat_template: str | None = None) -> dict[str, str | None] | None:
    """Return facts of a chat template: origin, reasoning marks, who describes tools, format of
    calls, problem (each None if there is none). The template is ``chat_template``, else the file's
    own; None if the file has none.
    """
    from treadle.chat.template.override import check_plain, choose_template
    from treadle.chat.template.template import load_template
    from treadle.chat.tools import find_dialect
    from treadle.errors import TreadleError

    names = ("template", "reasoning", "tools", "calls", "problem")
    told: dict[str, str | None] = dict.fromkeys(names)
    try:
        if chat_template is None:
            template = load_template(gguf)
            if template.builtin and "by the file" not in template.origin:
                return None
        else:
            template = load_template(gguf, "", choose_template(chat_template))
        told["template"] = template.origin
        check_plain(template)
        dialect = find_dialect(template)
    except TreadleError as error:
        return {**told, "problem": f"the chat template cannot be used: {error}"}
    if dialect.thought:
        told["reasoning"] = f"{dialect.thought.open.strip()} ... {dialect.thought.close.strip()}"
    told["tools"] = "by the template" if dialect.shows_tools else "by a sentence in the prompt"
    told["calls"] = f"{dialect.row.name}: {' '.join(dialect.row.trigger.split()) or 'JSON'}"
    if not dialect.writes_calls and re.search(r"\btools\b", template.source):
        told["problem"] = (
            "the chat template supports tools, but its calls cannot be parsed: tools are "
            "described by a sentence in the prompt, and calls are parsed in the format "
            f"{dialect.row.name}"
        )
    return told


def print_report(report: Mapping[str, object]) -> None:
    """Print the report of ``examine`` as indented text."""
    room = terminal_width()
    for line in render(report):
        at = hanging_indent(line)
        if room and at > room - LEAST_ROOM:  # the value follows its key
            begin = len(line) - len(line.lstrip())
            line = " " * begin + re.sub(" {2,}", "  ", line.lstrip())
            at = begin + 4
        say(line, indent=" " * at)


def render(report: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """Yield the indented lines of a report, a mapping of mappings, lists and values."""
    width = max((len(label(key)) for key in report), default=0)
    for key, value in report.items():
        if value and isinstance(value, Mapping):
            yield f"{indent}{label(key)}"
            yield from render(value, indent + "  ")
        elif isinstance(value, (list, tuple)) and any(len(str(item)) > 24 for item in value):
            yield f"{indent}{label(key)}"
            yield from (f"{indent}  {printable(str(item))}" for item in value)
        else:
            yield f"{indent}{label(key):<{width}}  {printable(written(key, value))}".rstrip()


def hanging_indent(line: str) -> int:
    """Return the indent of the line's continuations when it is wrapped: the column of its value."""
    begin = len(line) - len(line.lstrip())
    gap = line.find("  ", begin)
    return begin + 2 if gap < 0 else len(line) - len(line[gap:].lstrip())


def unit(key: str) -> str:
    """Return the unit at the end of ``key``, one of UNITS such as ``_bytes``; "" without one."""
    return next((ending for ending in UNITS if key.endswith(ending)), "")


def label(key: str) -> str:
    """Return the key of a report's value in words, without its unit."""
    return printable(key.removesuffix(unit(key)).replace("_", " "))


def written(key: str, value: object) -> str:
    """Format the value of ``key`` for people, with the unit that ``key`` ends in."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, (int, float)) and unit(key):
        return UNITS[unit(key)](value)
    return str(value)
