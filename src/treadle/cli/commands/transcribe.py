"""``treadle transcribe``: sounds to text, subtitles or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.options import DEVICE, THREADS, ModelType, Number
from treadle.cli.speech import load_recognizer, speech_model_path
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import remark
from treadle.errors import FileError, TreadleError, UnsupportedError

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer
    from treadle.speech.settings import TranscribeSettings
    from treadle.speech.transcription import Transcription

PIPE = "-"
# Flags, and the formats that they mean.
FORMAT_FLAGS = {
    "text": "text",
    "srt": "srt",
    "vtt": "vtt",
    "json": "verbose_json",
    "tsv": "tsv",
    "lrc": "lrc",
}
_HELP = {
    "text": "Plain text (the default), a line for each segment.",
    "srt": "Subtitles: SubRip.",
    "vtt": "Subtitles: WebVTT.",
    "json": "JSON with segments, and words with --words, in the form of OpenAI's verbose_json.",
    "tsv": "A table: begin and end in milliseconds, text.",
    "lrc": "Lines with times, as players show lyrics.",
}


def _format_options(function: Any) -> Any:
    """Add a flag for each output format to a command; those given arrive as ``formats``."""
    for flag, format in reversed(FORMAT_FLAGS.items()):
        option = click.option(
            f"--{flag}",
            "formats",
            flag_value=format,
            multiple=True,
            default=(),
            help=_HELP[flag],
        )
        function = option(function)
    return function


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "-m",
    "--model",
    required=True,
    type=ModelType(),
    metavar="MODEL",
    help="Speech model (Whisper): a file, a folder, hf:OWNER/REPO or a short name.",
)
@click.option(
    "-l",
    "--language",
    metavar="CODE",
    help="Spoken language, such as de or German; by default it is detected.",
)
@click.option("--translate", is_flag=True, help="Translate into English.")
@_format_options
@click.option("--words", is_flag=True, help="Find the times of words, for --json.")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a file for each FILE and format into DIR; by default standard output.",
)
@click.option("--beside", is_flag=True, help="Write these files beside each FILE.")
@click.option("--prompt", default="", metavar="TEXT", help="Names and spellings that occur.")
@click.option(
    "--text-before/--no-text-before",
    default=True,
    help="Let each 30 s see the text before them (the default), or decode several together, which "
    "is faster.",
)
@click.option(
    "--batch",
    default=8,
    show_default=True,
    type=click.IntRange(1, 8),
    metavar="N",
    help="Parts that are decoded together with --no-text-before.",
)
@click.option(
    "--voice-activity",
    default="energy",
    show_default=True,
    type=click.Choice(["energy", "silero", "off"]),
    help='What is left out: silence, all but speech (pip install "treadle[vad]"), or nothing.',
)
@click.option(
    "--beams",
    default=5,
    show_default=True,
    type=click.IntRange(1, 16),
    metavar="N",
    help="Beams of a beam search; 1 is greedy, and faster.",
)
@click.option(
    "--temperature",
    type=Number(0, 2),
    metavar="T",
    help="The only temperature; by default 0, and if the text is doubtful 0.2 to 1.",
)
@click.option("--seed", default=0, type=click.IntRange(0), metavar="N", help="Seed of samples.")
@THREADS
@DEVICE
def command(
    files: tuple[str, ...],
    model: str,
    language: str | None,
    translate: bool,
    formats: tuple[str, ...],
    words: bool,
    output: Path | None,
    beside: bool,
    threads: int | None,
    device: str | None,
    temperature: float | None,
    **settings: Any,
) -> None:
    """Transcribe each FILE; "-" is standard input.

    Text is printed while it is decoded. A sound of hours takes no more memory than one of a minute.
    A microphone is a pipe: arecord -q -f S16_LE -r 16000 | treadle transcribe -m MODEL -
    """
    wanted = tuple(dict.fromkeys(formats)) or ("text",)
    check_targets(files, wanted, output, beside)
    if words and "verbose_json" not in wanted:
        raise click.UsageError("--words: only --json has the times of words")
    from treadle.speech.settings import TEMPERATURES, TranscribeSettings

    own = TranscribeSettings(
        language=language,
        task="translate" if translate else "transcribe",
        words=words,
        temperatures=TEMPERATURES if temperature is None else (temperature,),
        **settings,
    )
    check_files(files)
    with ProgressBar("transcribing", "s") as progress:
        path = speech_model_path(model, progress)
        if path is None:
            raise UnsupportedError(f"{model}: not a speech model: expected Whisper")
        loading = {"threads": threads, "device": device}
        with load_recognizer(path, progress, loading) as recognizer:
            failed = 0
            for file in files:
                outlet = TranscriptWriter(file, wanted, output, beside, many=len(files) > 1)
                try:
                    transcribe_file(recognizer, file, own, outlet, progress)
                except TreadleError as error:
                    progress.close()
                    if len(files) == 1:
                        raise
                    failed += 1
                    remark(f"error: {error}")
    if failed:
        raise TreadleError(f"{failed} of {len(files)} files could not be transcribed")


def check_targets(
    files: Sequence[str], formats: Sequence[str], output: Path | None, beside: bool
) -> None:
    """Raise click.UsageError for options and outputs that conflict: two outputs into one file,
    several into standard output, standard input twice.
    """
    if output is not None and beside:
        raise click.UsageError("--output and --beside: choose one")
    if beside and PIPE in files:
        raise click.UsageError("--beside: standard input has no folder: use --output DIR")
    if files.count(PIPE) > 1:
        raise click.UsageError(f"{PIPE}: standard input can be read once")
    if output is not None or beside:
        targets = [target_of(file, each, output) for file in files for each in formats]
        twice = {str(target) for target in targets if targets.count(target) > 1}
        if twice:
            raise click.UsageError(f"{min(twice)}: would be written twice")
        return
    if len(formats) > 1:
        raise click.UsageError("several formats: name a folder with --output DIR, or --beside")
    if len(files) > 1 and formats[0] != "text":
        raise click.UsageError(
            "several files in one output: name a folder with --output DIR, or --beside"
        )


def check_files(files: Sequence[str]) -> None:
    """Raise FileError for a file that cannot be opened, before a model is loaded."""
    from treadle.errors import why

    for file in files:
        if file == PIPE:
            continue
        try:
            with open(file, "rb"):
                pass
        except (OSError, ValueError) as error:
            raise FileError(why(error), path=file or "''") from None


def target_of(file: str, format: str, folder: Path | None) -> Path:
    """Return the path of the output file of a format for the sound ``file``: in ``folder``, or
    beside the sound if that is None.
    """
    from treadle.speech.transcript_formats import SUFFIXES

    name = "stdin" if file == PIPE else Path(file).stem
    parent = Path(file).parent if folder is None else folder
    return parent / f"{name}{SUFFIXES[format]}"


class TranscriptWriter:
    """Writes one sound's transcript: to files at the end, or to standard output while it is
    decoded. ``many``: there are several sounds, so that each gets a heading.
    """

    def __init__(
        self,
        file: str,
        formats: Sequence[str],
        folder: Path | None,
        beside: bool,
        *,
        many: bool,
    ) -> None:
        self._file = file
        self._formats = formats
        self._folder = folder
        self.to_files = folder is not None or beside
        self._heading = f"==> {file} <==\n" if many and not self.to_files else ""
        self._n_written = 0

    @property
    def shows_bar(self) -> bool:
        """Whether a progress bar may be shown: not while text is written to the terminal."""
        return self.to_files or not sys.stdout.isatty()

    def write(self, transcription: Transcription) -> None:
        """Print the segments that are new since the last call; nothing in a format that is written
        whole, such as JSON, or if files are written.
        """
        from treadle.speech.transcript_formats import CUES

        format = self._formats[0]
        if self.to_files or format not in CUES:
            return
        new = transcription.segments[self._n_written :]
        text = "".join(
            CUES[format].part(segment, self._n_written + i) for i, segment in enumerate(new)
        )
        self._print(text)
        self._n_written += len(new)

    def finish(self, transcription: Transcription) -> None:
        """Write the files or, to standard output, a transcript whose format is written whole."""
        from treadle.speech.transcript_formats import CUES, formatted

        transcript = transcription.result()
        if self.to_files:
            for format in self._formats:
                target = target_of(self._file, format, self._folder)
                write_file(target, formatted(transcript, format))
        elif self._formats[0] not in CUES:
            self._print(formatted(transcript, self._formats[0]))
        else:
            self._print("")

    def _print(self, text: str) -> None:
        from treadle.errors import printable
        from treadle.speech.transcript_formats import CUES

        head = ""
        if not self._n_written:
            head = self._heading + getattr(CUES.get(self._formats[0]), "head", "")
            self._heading = ""
        if sys.stdout.isatty():
            text = printable(text, "\n\t")
        if head or text:
            click.echo(head + text, nl=False)
            sys.stdout.flush()


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically, and create its folder. Raises FileError if that fails."""
    from treadle.errors import why
    from treadle.files.target import write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise FileError(why(error), path=str(path)) from None


def transcribe_file(
    recognizer: SpeechRecognizer,
    file: str,
    settings: TranscribeSettings,
    outlet: TranscriptWriter,
    progress: ProgressBar,
) -> None:
    """Transcribe the sound ``file``, "-" for standard input, and write it to ``outlet``. Raises
    TreadleError for a sound that cannot be read.
    """
    source: Any = sys.stdin.buffer if file == PIPE else Path(file)
    place = "standard input" if file == PIPE else None
    with recognizer.run(source, settings, place=place) as transcription:
        while transcription.step():
            outlet.write(transcription)
            if outlet.shows_bar:
                total = transcription.seconds or 0.0
                progress("transcribing", int(transcription.seconds_done), int(total))
        progress.close()
        outlet.finish(transcription)
