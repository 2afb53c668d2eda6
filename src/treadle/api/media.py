"""Pictures and sounds of a model's prompts: its projector, and the token ids that stand for their
rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import cached_property
from treadle.chat.media_parts import MediaPart, read_media_part, split_at_markers
from treadle.errors import TreadleError, UnsupportedError
from treadle.kvcache.media import MediaEntry
from treadle.media.address_policy import AddressPolicy, is_address
from treadle.media.file_formats import media_format
from treadle.media.limits import MediaLimits
from treadle.media.marks import MediaMarks, MediaRows, Piece, TextPiece, encode_pieces
from treadle.media.sound_buffer import RATE
from treadle.scheduler.request import MediaEncoder, MediaPrompt, MediaUsage

if TYPE_CHECKING:
    from treadle.chat.prompt import ChatPrompt
    from treadle.engine.engine import Engine
    from treadle.media.prepared import PreparedMedia
    from treadle.media.projector import Projector
    from treadle.scheduler.request import Encoding
    from treadle.tokenizer.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]

ENCODING = {"image": "reading the picture", "audio": "reading the sound"}  # stages of progress
STEPS = 100  # of the progress of one picture
WARMED = ((64, 64), (1024, 1024))  # height and width of pictures whose plans are compiled
WARMED_S = 1, 30  # seconds of such sounds
DETAIL_ROWS = {"low": 256, "high": 2048}  # most rows of a picture, by a call's ``detail``


class ModelMedia:
    """A model's projector, and the limits of its pictures and sounds.

    ``urls``: whether sources may be http(s) addresses, or a list of the hosts allowed;
    ``max_rows``: most rows of a picture, None for the default of the model's family; ``limits``:
    bounds of number and sizes, None for the usual; ``progress(stage, done, total)``: called while a
    picture or sound is encoded.
    """

    def __init__(
        self,
        projector: Projector,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        urls: bool | Sequence[str] = True,
        max_rows: int | None = None,
        limits: MediaLimits | None = None,
        progress: Progress | None = None,
    ) -> None:
        projector.check(engine.config)
        self.projector = projector
        self.limits = limits or MediaLimits()
        self.policy = AddressPolicy(bool(urls), () if isinstance(urls, bool) else tuple(urls))
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._progress = progress

    @property
    def modalities(self) -> frozenset[str]:
        """The kinds of media that the projector reads: "image", "audio"."""
        return frozenset(self.projector.modalities)

    @property
    def marks(self) -> tuple[MediaMarks, ...]:
        """The texts that stand for pictures and sounds in rendered prompts, for each kind."""
        families = {kind: self.projector.family(kind) for kind in self.projector.modalities}
        return tuple(
            MediaMarks(kind, family.placeholders, tuple(family.marks))
            for kind, family in families.items()
        )

    @cached_property
    def mark_ids(self) -> tuple[int, ...]:
        """The ids of special tokens that mark pictures and sounds: no answer may contain them."""
        spelt = {text for each in self.marks for text in (*each.placeholders, *each.reserved)}
        encoded = (self._tokenizer.encode(text, bos=False, special=True) for text in spelt)
        return tuple(sorted({ids[0] for ids in encoded if len(ids) == 1}))

    def chat_ids(self, prompt: ChatPrompt, *, bounded: bool = True) -> list[int]:
        """Return the token ids of a rendered chat prompt, as a ``MediaPrompt`` if it has pictures
        or sounds. ``bounded``: raise ContextFullError if their rows alone exceed the context.
        """
        if prompt.media is None:
            return self._tokenizer.encode_prompt(prompt.text)
        prepared = self._prepare(prompt.media.parts, bounded=bounded)
        return self._ids(prompt.split([each.layout for each in prepared]), prepared)

    def raw_ids(self, pieces: Sequence[str | MediaPart]) -> MediaPrompt:
        """Return the token ids of ``pieces``: texts with pictures and sounds between them. Each
        picture or sound gets the marks that the model's chat template would write around it.
        """
        parts = [piece for piece in pieces if not isinstance(piece, str)]
        prepared = iter(self._prepare(parts))
        used = []
        made: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str):
                made.append(TextPiece(piece))
                continue
            each = next(prepared)
            used.append(each)
            for part in each.layout:
                at = len(used) - 1
                made.append(TextPiece(part) if isinstance(part, str) else MediaRows(at, part))
        return self._ids(made, used)

    def _prepare(self, parts: Sequence[MediaPart], *, bounded: bool = True) -> list[PreparedMedia]:
        """Decode and resize the pictures and sounds ``parts``. Raises TreadleError for too many,
        ContextFullError if ``bounded`` and their rows exceed the context, FileError and
        UnsupportedError for one that cannot be read.
        """
        self.limits.check_count(len(parts), "the prompt")
        made = []
        n_rows = 0
        n_pixels = 0
        for part in parts:
            made.append(self._prepare_one(part))
            n_rows += made[-1].n_rows
            if bounded:
                self._engine.cache.check_context(n_rows)
            if part.kind == "image":
                n_pixels += math.prod(made[-1].size)
                self.limits.check_pixels(n_pixels, part.place)
        return made

    def _prepare_one(self, part: MediaPart) -> PreparedMedia:
        if part.kind not in self.modalities:
            if why := self.projector.unread.get(part.kind):
                raise UnsupportedError(f"{part.place}: {why}")
            have = " and ".join(sorted(self.modalities))
            raise TreadleError(f"{part.place}: the model reads no {part.kind}, only {have}")
        from treadle.media.source import read_picture, read_sound  # slow to import

        read = read_picture if part.kind == "image" else read_sound
        data = read(part.source, self.limits, self.policy, part.place)
        try:
            return self._prepare_as_wished(data, part)
        except TreadleError as error:
            if type(error) is not TreadleError:  # subclasses name the part already
                raise
            raise TreadleError(f"{part.place}: {error}") from error

    def _prepare_as_wished(self, data: np.ndarray, part: MediaPart) -> PreparedMedia:
        """Prepare ``data``, the decoded picture or sound of ``part``. A picture gets at most the
        rows of its ``detail`` or, if the family cannot make it so small, of the usual limit. A
        sound's rows follow from its length.
        """
        if part.kind == "audio":
            return self.projector.prepare(data, None, part.kind)
        if part.detail in DETAIL_ROWS:
            with suppress(TreadleError):
                return self.projector.prepare(data, self._rows_of(part.detail), part.kind)
        return self.projector.prepare(data, self._rows_of(), part.kind)

    def _rows_of(self, detail: str = "auto") -> int | None:
        """Return the most rows of a picture with this ``detail``; None for the family's default."""
        bounds = [self._max_rows, DETAIL_ROWS.get(detail)]
        if self._engine.config.media.spans:  # a span must fit one run
            bounds.append(self._engine.max_tokens)
        return min((each for each in bounds if each is not None), default=None)

    def _ids(self, pieces: Sequence[Piece], prepared: Sequence[PreparedMedia]) -> MediaPrompt:
        encoders: dict[MediaEntry, MediaEncoder] = {}
        entries = []
        for each in prepared:
            entry = self._enter(
                MediaEntry(
                    each.digest, each.n_rows, each.positions, each.advance, each.bidirectional
                )
            )
            entries.append(entry)
            encoders.setdefault(entry, self._encoder(each))
        ids: list[int] = []
        for piece in encode_pieces(pieces, self._tokenizer):
            if isinstance(piece, MediaRows):
                rows = piece.rows
                ids += entries[piece.index].ids[rows.start : rows.stop]
            else:
                ids.append(piece)
        usage = [MediaUsage(p.kind, p.n_rows, p.size, p.resized) for p in prepared]
        return MediaPrompt(ids, encoders, usage, sum(each.n_bytes for each in prepared))

    def _enter(self, new: MediaEntry) -> MediaEntry:
        """Return the engine's entry for a picture or sound: an earlier one of the same content, or
        ``new``.
        """
        registry = self._engine.media
        entry = registry.add(new)
        if entry is None:
            with self._engine.lock:
                entry = registry.enter(new, self._engine.cache.tree)
        return entry

    def warm(self) -> None:
        """Compile the plans that pictures and sounds of usual sizes need."""
        rows = self._rows_of()
        usual: dict[str, list[np.ndarray]] = {
            "image": [np.zeros((*size, 3), np.uint8) for size in WARMED],
            "audio": [np.zeros(seconds * RATE, np.float32) for seconds in WARMED_S],
        }
        for kind in self.modalities:
            for data in usual[kind]:
                try:
                    prepared = self.projector.prepare(data, rows if kind == "image" else None, kind)
                except TreadleError:  # a size that the family refuses
                    continue
                self.projector.warm(prepared)

    def _encoder(self, prepared: PreparedMedia) -> MediaEncoder:
        grids = tuple(each.grid for each in prepared.inputs)
        n_patches = sum(each.n_rows for each in prepared.inputs)
        shape = (self.projector, prepared.kind, grids)
        return MediaEncoder(self._encode, prepared, shape, n_patches)

    def _encode(self, prepared: Sequence[PreparedMedia]) -> Encoding:
        """Return the encoding of pictures or sounds of one kind, which runs in slices
        (``Projector.encode_runs``), with progress reports.
        """
        report = self._progress
        if report is None:
            return (yield from self.projector.encode_runs(prepared))
        stage = ENCODING[prepared[0].kind]

        def share_done(share: float) -> None:
            report(stage, int(share * STEPS), STEPS)

        try:
            return (yield from self.projector.encode_runs(prepared, share_done))
        finally:
            report(stage, STEPS, STEPS)

    def close(self) -> None:
        """Close the projector's file and release its weights."""
        self.projector.close()


def pieces_of(prompt: str, media: Sequence[Any]) -> list[str | MediaPart]:
    """Split a prompt at its markers ``<__media__>``; return its texts with the pictures and sounds
    ``media`` in the markers' places, or all of them before the text if it has no marker. ``media``:
    paths, bytes, images, arrays, or parts of messages.

    Raises TreadleError if the prompt has markers, but not as many as there are media.
    """
    parts = [_part_of(each, f"media[{i}]") for i, each in enumerate(media)]
    pieces = split_at_markers(prompt, len(parts), "the prompt")
    return [piece if isinstance(piece, str) else parts[piece] for piece in pieces]


def _part_of(given: Any, place: str) -> MediaPart:
    """Return ``given``, a picture or sound, as a part of a prompt; its content tells which it is.
    ``place``: its name for errors. Raises TreadleError.
    """
    if isinstance(given, Mapping):
        part = read_media_part(given, place, local=True)
        if part is None:
            raise TreadleError(f"{place}: type {given.get('type')!r:.40}: expected image or audio")
        return part
    if isinstance(given, np.ndarray | tuple):
        samples = given[0] if isinstance(given, tuple) else given
        return MediaPart("audio" if np.ndim(samples) == 1 else "image", given, place)
    if isinstance(given, str) and is_address(given):
        return MediaPart("image", given, place)
    if isinstance(given, str | os.PathLike | bytes):
        from treadle.media.source import read_bytes  # slow to import

        data = read_bytes(given, "audio", place=None if isinstance(given, bytes) else f"{given}")
        found = media_format(data)
        is_sound = found is not None and found.kind == "audio"
        return MediaPart("audio" if is_sound else "image", data, place)
    return MediaPart("image", given, place)
