"""Pictures and sounds that the user names on the command line or drops on a chat."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted
from treadle.errors import FileError, TemplateError, TreadleError, UnsupportedError, why

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.media.kinds import MediaKind
    from treadle.scheduler.request import MediaUsage

LONGEST = 4096  # characters of a line that may be paths
HEAD = 1024  # bytes of a file that tell its format
CURE = "name its projector with --mmproj FILE, or put the file beside the model"


@dataclass(frozen=True)
class MediaFile:
    """A picture or a sound. ``source``: an absolute path, or an http(s) address."""

    kind: MediaKind
    source: str

    @property
    def part(self) -> dict[str, str]:
        """The part of a chat message for this file: ``{"type": "image", "image": source}``."""
        return {"type": self.kind, self.kind: self.source}

    @property
    def name(self) -> str:
        """The name for messages to the user: the file's name, or the address."""
        from treadle.media.address_policy import is_address

        return self.source if is_address(self.source) else Path(self.source).name


def open_media_file(name: str) -> MediaFile:
    """Return the picture or sound that the user names; its first bytes tell which of the two it is.
    ``~`` and ``file://`` are resolved. An address, which is not fetched here, counts as a picture.

    Raises FileError for a file that cannot be read, UnsupportedError for another kind of file.
    """
    from treadle.media.address_policy import is_address

    if is_address(name):
        return MediaFile("image", name)
    from treadle.media.file_formats import PICTURES, SOUNDS, media_format
    from treadle.media.local_path import local_path

    if not name:
        raise FileError("an empty name", path="''", expected="a picture or a sound")
    path = Path(os.path.abspath(os.path.expanduser(local_path(name))))
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except (OSError, ValueError) as error:
        raise FileError(why(error), path=name) from None
    if not head:
        raise FileError("an empty file", path=name, expected="a picture or a sound")
    found = media_format(head)
    if found is None or found.kind is None:
        what = f"is {found.name}" if found else "is neither a picture nor a sound"
        expected = ", ".join(known.name for known in (*PICTURES, *SOUNDS))
        raise UnsupportedError(f"{name}: {what}: expected {expected}")
    return MediaFile(found.kind, str(path))


def split_paths(text: str) -> list[str]:
    """Split a typed or dropped text into paths: quoted, with escaped spaces, or one existing path
    with plain spaces.
    """
    text = text.strip()
    if os.path.exists(os.path.expanduser(text)):
        return [text]
    import shlex  # rarely needed

    escapes = os.sep != "\\"  # elsewhere a backslash separates folders
    try:
        words = shlex.split(text, posix=escapes)
    except ValueError:  # a lone quote
        return [text]
    return words if escapes else [word.strip("\"'") for word in words]


def dropped_files(line: str) -> list[MediaFile]:
    """Return the files if ``line`` consists only of paths of existing pictures and sounds, as a
    terminal writes them when files are dropped on it; else [].
    """
    line = line.strip()
    if not line or len(line) > LONGEST or "\n" in line:
        return []
    names = split_paths(line)
    if not all(map(_is_file, names)):
        return []
    try:
        return [open_media_file(name) for name in names]
    except TreadleError:
        return []


def _is_file(name: str) -> bool:
    return name[:7].lower() == "file://" or os.path.isfile(os.path.expanduser(name))


def check_reads(model: Model, files: Sequence[MediaFile]) -> None:
    """Raise UnsupportedError if the model does not read one of these files' kinds."""
    if not files:
        return  # without opening a projector
    have = model.modalities
    from treadle.media.kinds import NOUNS, plurals

    for file in files:
        if file.kind not in have:
            reads = " and ".join(["text", *plurals(have)])
            cure = "" if have else f": {CURE}"
            what = f"a {NOUNS[file.kind]}, but {model.path.name} reads {reads} only{cure}"
            raise UnsupportedError(f"{file.name}: {what}")


def message_parts(text: str, files: Sequence[MediaFile]) -> list[dict[str, str]]:
    """Return the parts of a message: files take the places of ``<__media__>`` in the text, or stand
    before it if it has no such marker. Raises click.UsageError if there are not as many markers as
    files.
    """
    if not files:
        return [{"type": "text", "text": text}]
    from treadle.chat.media_parts import split_at_markers

    try:
        pieces = split_at_markers(text, len(files), "the prompt")
    except TemplateError as error:
        raise click.UsageError(str(error)) from None
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else files[piece].part
        for piece in pieces
    ]


def usage_text(usage: Sequence[MediaUsage], seconds: float) -> str:
    """Format the pictures and sounds of a prompt with their tokens, and ``seconds``, the time of
    encoding those that were not cached; "" for a prompt without any.
    """
    if not usage:
        return ""
    from treadle.media.kinds import NOUNS

    counts = []
    for kind, noun in NOUNS.items():
        n_tokens = [each.n_tokens for each in usage if each.kind == kind]
        if n_tokens:
            n = counted(len(n_tokens), noun) if len(n_tokens) > 1 else noun
            counts.append(f"{n} of {counted(sum(n_tokens), 'token')}")
    return ", ".join(counts) + (f", encoded in {seconds:.1f} s" if seconds else "")
