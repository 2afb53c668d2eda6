"""Reads ``tokenizer.model`` and ``spiece.model``: sentencepiece's ModelProto, a protobuf message.

::

    ModelProto     {1: pieces .. {1: piece, 2: score, 3: type}, 2: trainer_spec, 3: normalizer_spec}
    TrainerSpec    {3: model_type, 40: unk_id, 41: bos_id, 42: eos_id, 43: pad_id}
    NormalizerSpec {2: precompiled_charsmap, 3: add_dummy_prefix, 4: remove_extra_whitespaces}
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.mapping import map_file
from treadle.tokenizer.vocab import TokenType

UNIGRAM = 1  # TrainerSpec.ModelType, and its default
BPE = 2
_MODELS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "character"}
_IDS = {40: ("unk", 0), 41: ("bos", 1), 42: ("eos", 2), 43: ("pad", -1)}  # and their defaults


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary: ``pieces``, ``scores`` and ``types`` by id; ``ids`` of unk, bos, eos and pad,
    if they exist; ``charsmap``: the table that normalises text, empty if there is none.
    """

    pieces: list[bytes]
    scores: list[float]
    types: list[int]
    ids: dict[str, int]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes = b""


def read_sentencepiece(path: Path, kind: int = BPE) -> SentencePieceModel:
    """Read a sentencepiece model of type ``kind`` (BPE or UNIGRAM).

    Raises FileError if it is invalid, UnsupportedError for another type, and for a BPE with a table
    that normalises text.
    """
    with map_file(path, "a sentencepiece model") as mapped:
        return parse_sentencepiece(bytes(mapped), path, kind)


def parse_sentencepiece(raw: bytes, path: Path, kind: int = BPE) -> SentencePieceModel:
    """Parse the bytes ``raw`` of a file; ``path`` is for messages. Errors as
    ``read_sentencepiece``'s.
    """
    pieces: list[bytes] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {3: 1}
    normalizer: dict[int, int] = {}
    charsmap = b""
    message = _Message(raw, path)
    for number, value in message.fields(0, len(raw)):
        if number == 1 and isinstance(value, tuple):
            piece, score, type_ = _piece(message, *value)
            pieces.append(piece)
            scores.append(score)
            types.append(type_)
        elif number in (2, 3) and isinstance(value, tuple):
            spec = trainer if number == 2 else normalizer
            for key, field in message.fields(*value):
                spec[key] = field[1] - field[0] if isinstance(field, tuple) else field
                if number == 3 and key == 2 and isinstance(field, tuple):
                    charsmap = raw[field[0] : field[1]]
    if not pieces:
        raise FileError("has no pieces", path=path, expected="a sentencepiece model")
    if trainer[3] != kind:
        kind_name = _MODELS.get(trainer[3], str(trainer[3]))
        raise UnsupportedError(
            f"{path}: a sentencepiece model of type {kind_name}: treadle supports only "
            f"{_MODELS[kind]} here"
        )
    if charsmap and kind == BPE:
        raise UnsupportedError(
            f"{path}: a sentencepiece model that normalises text with a table "
            "(precompiled_charsmap): not supported"
        )
    ids = {name: _signed(trainer.get(key, default)) for key, (name, default) in _IDS.items()}
    ids = {name: i for name, i in ids.items() if 0 <= i < len(pieces)}
    prefix = bool(normalizer.get(3, 1))
    spaces = bool(normalizer.get(4, 1))
    return SentencePieceModel(pieces, scores, types, ids, prefix, spaces, charsmap)


def _piece(message: _Message, start: int, end: int) -> tuple[bytes, float, int]:
    piece = b""
    score = 0.0
    kind = int(TokenType.NORMAL)
    for number, value in message.fields(start, end):
        if number == 1 and isinstance(value, tuple):
            piece = message.raw[value[0] : value[1]]
        elif number == 2 and isinstance(value, int):
            score = float(struct.unpack("<f", value.to_bytes(8, "little")[:4])[0])
        elif number == 3 and isinstance(value, int):
            kind = value
    if kind not in tuple(TokenType) or score - score != 0.0:  # NaN for inf and NaN
        raise message.error(f"a piece of type {kind} with score {score}", start)
    return piece, score, kind


def _signed(value: int) -> int:
    """Decode a protobuf int32, which is written as 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class _Message:
    """A reader of protobuf's wire format that copies nothing; every length is checked first."""

    def __init__(self, raw: bytes, path: Path) -> None:
        self.raw = raw
        self.path = path

    def error(self, what: str, at: int) -> FileError:
        expected = "a sentencepiece model"
        return FileError(what, path=self.path, offset=at, expected=expected)

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
        """Yield number and value of each field: an int, or (start, end) of a string or message."""
        while at < end:
            begin = at
            tag, at = self._varint(at, end)
            number = tag >> 3
            wire = tag & 7
            if wire == 0:
                value, at = self._varint(at, end)
                yield number, value
                continue
            if wire == 2:
                size, at = self._varint(at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise self.error(f"wire type {wire}", begin)
            if number == 0 or size > end - at:
                raise self.error(f"field {number} of {size} bytes, with {end - at} left", begin)
            if wire == 2:
                yield number, (at, at + size)
            else:
                yield number, int.from_bytes(self.raw[at : at + size], "little")
            at += size

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.raw[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1, at
            shift += 7
        raise self.error("an unterminated varint", at)
