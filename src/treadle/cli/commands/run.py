"""``treadle run``: complete a prompt; standard output has only the completion."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.answer_options import (
    GenerationOptions,
    generation_options,
    option_names,
    template_options,
)
from treadle.cli.load import is_model, load_model, read_bytes
from treadle.cli.options import MEDIA_FILES, ModelCommand, ModelType, as_usage, writing_load_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import emit, print_json, remark
from treadle.errors import FileError, SamplingError

if TYPE_CHECKING:
    from treadle.api.generation import Generation
    from treadle.api.model import Model
    from treadle.cli.media_files import MediaFile


@click.command(cls=ModelCommand)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]", type=ModelType())
@generation_options
@MEDIA_FILES
@template_options
@click.option(
    "--raw",
    is_flag=True,
    help="Use the prompt byte for byte: no BOS, no control tokens, no newline removed; with "
    "pictures, no chat template.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option(
    "--stats/--no-stats",
    default=None,
    help="Print statistics to standard error: kernels compiled, speed, context, memory; "
    "by default a terminal gets one line.",
)
@writing_load_options
def command(
    words: tuple[str, ...],
    options: GenerationOptions,
    files: tuple[MediaFile, ...],
    raw: bool,
    as_json: bool,
    stats: bool | None,
    load: dict[str, Any],
    defaults: dict[str, Any],
) -> None:
    """Complete PROMPT, or standard input, and stream only the completion.

    A single word that is an existing file or a Hugging Face folder, ends in .gguf or begins with
    hf: is MODEL; anything else is PROMPT. Without MODEL, the small model that ships with treadle
    completes Python code. With --image or --audio, PROMPT is a question: it goes through the chat
    template of the model's file, if that has one. With an option for the chat template or
    reasoning it always is one, with a built-in template if the file has none.
    """
    if raw and defaults:
        raise click.UsageError(f"--raw uses no chat template: leave out {option_names(defaults)}")
    asks = bool(defaults.keys() - {"strict"})
    model_ref, prompt = split_words(words)
    if prompt is None:
        prompt = read_prompt(raw=raw)
    elif not is_utf8(prompt):
        raise click.UsageError("PROMPT is not UTF-8")
    parts = [{"type": "text", "text": prompt}]
    if files:
        from treadle.cli.media_files import check_reads, message_parts

        parts = message_parts(prompt, files)
    with ProgressBar() as progress:
        model = load_model(model_ref, progress, reads_media=bool(files), **load, **defaults)
        options = options.with_model_defaults(model)
        if files:
            check_reads(model, files)
        with options.naming_file():
            with as_usage(SamplingError):  # settings that do not fit this vocabulary
                generation = begin(model, prompt, parts, options, raw=raw, asks=asks)
            if as_json:
                print_json(report(model, prompt, generation))
            else:
                if progress.enabled and options.max_tokens != 1:
                    model.plan()  # compile now, or a progress bar would cover the text
                stream(generation)
    if not generation.text and reasoning_of(generation):
        remark("the answer ended within the model's reasoning, which is not shown: raise -n")
    if generation.finish_reason == "context":
        remark(f"stopped: the context of {model.n_ctx} tokens is full")
    if stats or (stats is None and is_watched() and not as_json):
        show_stats(model, generation, whole=bool(stats))


def begin(
    model: Model,
    prompt: str,
    parts: Sequence[dict[str, str]],
    options: GenerationOptions,
    *,
    raw: bool,
    asks: bool = False,
) -> Generation:
    """Return the generation of the completion or answer, not started.

    ``parts``: the prompt with its pictures and sounds. They become a user's message if the model's
    file has a chat template; without one, and with ``raw``, the pictures stand in the prompt's
    text. ``asks``: always a user's message, with a built-in template if the file has none.
    """
    settings = options.settings()
    media = [part for part in parts if part["type"] != "text"]
    if asks:
        return model.chat([{"role": "user", "content": list(parts)}], tools=[], **settings)
    if not media:
        ids = model.tokenize(prompt, bos=False if raw else None, special=not raw)
        if not ids:
            raise click.ClickException(
                "the prompt is empty: give at least one character as PROMPT or on standard input"
            )
        return model.generate(ids, **settings)
    if not raw and model.template.builtin is None:
        return model.chat([{"role": "user", "content": list(parts)}], tools=[], **settings)
    return model.generate(prompt, media=media, **settings)


def is_watched() -> bool:
    """Return whether both standard output and standard error are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def show_stats(model: Model, generation: Generation, *, whole: bool) -> None:
    """Print statistics of the run on standard error: all of them (``whole``), or one line."""
    from treadle.cli.commands.chat import note, turn_of
    from treadle.cli.stats import report

    turn = turn_of(model, generation)
    text = report(model, turn) if whole else str(turn)
    note(f"\n{text}" if whole and is_watched() else text)  # a blank line after the output


def split_words(words: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Return MODEL and PROMPT, None for one that is missing. A single word is MODEL if it names a
    model, else PROMPT. Raises click.UsageError for more than two words.
    """
    if len(words) > 2:
        raise click.UsageError(
            f"expected MODEL and PROMPT, got {len(words)} words: put the prompt in quotes"
        )
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    return (words[0], None) if is_model(words[0]) else (None, words[0])


def read_prompt(*, raw: bool) -> str:
    """Return the prompt from standard input. Without ``raw`` one newline at its end, the shell's,
    is removed.
    """
    if sys.stdin.isatty():
        remark("type the prompt; end it with Ctrl-D")
    try:
        prompt = read_bytes("-").decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"standard input is not UTF-8: byte {error.start}: {error.reason}"
        raise click.ClickException(message) from error
    return prompt if raw else prompt.removesuffix("\n")


def is_utf8(argument: str) -> bool:
    """Return whether a command-line argument is valid UTF-8: Python represents other bytes as
    surrogates.
    """
    return not any("\ud800" <= c <= "\udfff" for c in argument)


def stream(generation: Generation) -> None:
    """Write each piece of the generation to standard output as it comes; a terminal gets a newline
    at the end, a pipe the exact text.
    """
    try:
        for piece in generation:
            emit(piece)
    except FileError:  # the model's file shrank: its error begins a new line
        if generation.text and sys.stdout.isatty():
            emit("\n")
        raise
    if sys.stdout.isatty():
        emit("\n")


def report(model: Model, prompt: str, generation: Generation) -> dict[str, Any]:
    """Run the generation to its end and return what ``--json`` prints: model, prompt, text, finish
    reason, media, token ids and timings.
    """
    for _ in generation:
        pass
    timings = generation.timings
    return {
        "model": str(model.path),
        "prompt": prompt,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        **media_report(generation),
        "prompt_ids": list(generation.prompt_ids),
        "ids": list(generation.ids),
        "timings": dataclasses.asdict(timings),
    }


def media_report(generation: Generation) -> dict[str, Any]:
    """Return what the report has only with media: "media", with sizes as (height, width) in pixels,
    and "reasoning"; empty for a prompt without media.
    """
    if not generation.media:
        return {}
    reasoning = reasoning_of(generation)
    return {
        "media": [dataclasses.asdict(each) for each in generation.media],
        **({"reasoning": reasoning} if reasoning else {}),
    }


def reasoning_of(generation: Generation) -> str:
    """Return the reasoning of a ``Reply``; "" for a completion, whose text is not split."""
    found: str = getattr(generation, "reasoning", "")
    return found
