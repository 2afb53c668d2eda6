"""SentencePiece vocabularies (``llama``): a model for ``sentencepiece`` built from GGUF's arrays.

``sentencepiece`` reads its model as a protobuf message of one record for each piece. Numpy writes
the records straight from the file's bytes, so that 262,144 pieces take about 25 ms instead of
seconds through message objects.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property
from treadle.base.fork_safety import library_lock
from treadle.files.metadata import GGUFArray, string_array
from treadle.tokenizer.normalizer import MARK
from treadle.tokenizer.short_texts import LibraryNeeded, ShortTexts, StringIndex, merge
from treadle.tokenizer.tokenizer import SpecialTokenSplitter, Tokenizer
from treadle.tokenizer.vocab import SPACES, TokenType, Vocab, windows

_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")

# ModelProto.pieces (field 1), each {1: piece, 2: score, 3: type}; the piece comes last here, so
# that everything before it has one size. Lengths are varints stretched to three bytes.
_RECORD = np.dtype(
    [
        ("tag", "u1"),
        ("size", "u1", 3),
        ("score_tag", "u1"),
        ("score", "<f4"),
        ("type_tag", "u1"),
        ("type", "u1"),
        ("piece_tag", "u1"),
        ("piece_size", "u1", 3),
    ]
)
_APART = TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE  # never merged from others
_MAX_PIECE = 4096  # bytes; sentencepiece refuses longer ones

# trainer_spec (field 2) {3: model_type = BPE, 35: byte_fallback}, normalizer_spec (field 3)
# {1: name, 3: add_dummy_prefix = 0, 4: remove_extra_whitespaces = 0, 5: escape_whitespaces = 1}
_TRAINER = b"\x12\x05\x18\x02\x98\x02"
_NORMALIZER = b"\x1a\x10\x0a\x08identity\x18\x00\x20\x00\x28\x01"


class SpmTokenizer(Tokenizer):
    """SentencePiece's BPE: scored pieces with U+2581 for a space, encoded by the library; short
    texts by ScoredMerger.
    """

    pre = "default"

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab, add_bos=True)
        if vocab.scores is None:
            vocab.fail("tokenizer.ggml.scores", "is missing", "a score for each token")
        prepend = vocab.text(SPACES, "")
        self.adds_space = vocab.flag("tokenizer.ggml.add_space_prefix", True)
        self.space_after_special = prepend != "first"
        self._unspaced = (" ", MARK) if prepend else ()  # text that begins so gets no space
        types = vocab.types.copy()
        self._byte_of = self._byte_pieces(types)
        # All 256 or none: sentencepiece refuses an incomplete set, which could not spell every
        # text.
        fallback = len(set(self._byte_of.values())) == len(self._byte_of) == 256
        if not fallback:
            types[types == TokenType.BYTE] = TokenType.CONTROL
        # It also requires exactly one unknown piece, while files have none or dozens.
        unknowns = np.flatnonzero(types == TokenType.UNKNOWN)
        unk = self.unk if self.unk is not None else next(iter(unknowns.tolist()), None)
        types[unknowns] = TokenType.UNUSED
        if unk is not None:
            types[unk] = TokenType.UNKNOWN
        self._unk = unk
        self._types = types
        self._fallback = fallback
        self._short = ShortTexts(vocab.n)
        self._merger: ScoredMerger | None = None
        try:
            if self._short.are_left:
                self._merger = ScoredMerger(vocab, types)
        except LibraryNeeded:
            pass
        if self._merger is None:
            self.prepare()

    def prepare(self) -> None:
        """Build the tables of ``sentencepiece``. Raises FileError for pieces that it refuses."""
        assert self._processor is not None
        self._merger = None

    @cached_property
    def _processor(self) -> Any:
        """The encoder of the library ``sentencepiece``, built on first use."""
        return _load(self.vocab, self._types, self._fallback)

    def _byte_pieces(self, types: npt.NDArray[np.int32]) -> dict[int, int]:
        found: dict[int, int] = {}
        for token in np.flatnonzero(types == TokenType.BYTE).tolist():
            match = _BYTE_PIECE.fullmatch(self.vocab.raw(token))
            if match is None:
                what = f"{self.vocab.raw(token)!r} (token {token}) is typed as a byte"
                self.vocab.fail("tokenizer.ggml.tokens", what, "<0x00> to <0xFF>")
            found[token] = int(match[1], 16)
        return found

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``; with ``start``, it first gets a space in front if the file
        asks for one. Characters that are lost, since the file has no unknown token, are warned of.
        """
        # The space is put here and not by sentencepiece, which does not know what precedes the
        # text.
        if start and self.adds_space and not text.startswith(self._unspaced):
            text = " " + text
        merger = self._merger  # ``prepare`` may drop it in another thread
        if merger is not None:
            if self._short.take(text):
                with suppress(LibraryNeeded):
                    return merger.encode(text)
            self.prepare()
        ids: list[int] = self._processor.encode(text)
        if self._unk is None and self.n_vocab in ids:
            encode = self._processor.encode
            unknown = self.n_vocab
            lost = {each for each in set(text) if unknown in encode(each)}
            self.warn_dropped(each for each in text if each in lost)
            ids = [each for each in ids if each != unknown]
        return ids

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """Return the piece with spaces for U+2581; of a byte piece, the byte; of the unknown token,
        U+FFFD.
        """
        kind = self._kinds[token]
        if kind == TokenType.BYTE:
            return bytes([self._byte_of[token]])
        if kind == TokenType.CONTROL:
            return raw
        return b"\xef\xbf\xbd" if token == self._unk else raw.replace(b"\xe2\x96\x81", b" ")


class ScoredMerger:
    """Encoder of texts by the pieces' scores, without the library's tables.

    ``types`` int32 [n]: TokenType of each piece. Raises LibraryNeeded for empty, too long or
    duplicate pieces, which the library does not take as they are either.
    """

    def __init__(self, vocab: Vocab, types: npt.NDArray[np.int32]) -> None:
        sizes = vocab.sizes
        if int(sizes.min()) == 0 or int(sizes.max()) > _MAX_PIECE or vocab.scores is None:
            raise LibraryNeeded
        self._pieces = StringIndex(vocab.tokens)
        self._types = types
        self._scores = vocab.scores
        # These are never merged: a text is split at them first.
        defined = np.flatnonzero(types == TokenType.USER_DEFINED).tolist()
        names = (raw.decode("utf-8", "replace") for raw in vocab.tokens.raws(defined))
        self._defined = SpecialTokenSplitter(dict(zip(names, defined, strict=True)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises LibraryNeeded for a character that is not a piece, and
        where merging would make a piece of type UNUSED, which the library splits again.
        """
        ids: list[int] = []
        for part in self._defined.split(text.replace(" ", MARK)):
            if isinstance(part, int):
                ids.append(part)
                continue
            for symbol in merge([letter.encode() for letter in part], self._priority):
                id = self._pieces.get(symbol)
                if id is None or self._types[id] != TokenType.NORMAL:
                    raise LibraryNeeded
                ids.append(id)
        return ids

    def _priority(self, left: bytes, right: bytes) -> float | None:
        id = self._pieces.get(left + right)
        if id is None or self._types[id] in _APART:
            return None
        if self._types[id] != TokenType.NORMAL:  # sentencepiece splits unused pieces again
            raise LibraryNeeded
        return -float(self._scores[id])


def _load(vocab: Vocab, types: npt.NDArray[np.int32], fallback: bool) -> Any:
    from sentencepiece import SentencePieceProcessor

    def processor(tokens: GGUFArray) -> Any:
        proto = model_proto(vocab, tokens, types, fallback)
        with library_lock:  # protobuf builds its tables under locks of its own
            return SentencePieceProcessor(model_proto=proto)

    if int(vocab.sizes.max()) <= _MAX_PIECE:
        try:
            return processor(vocab.tokens)
        except (RuntimeError, ValueError):
            pass  # perhaps an empty piece or a duplicate: try again with other names for those
    tokens = _all_different(vocab, types)
    try:
        return processor(tokens)
    except (RuntimeError, ValueError) as e:  # ValueError: the message is not UTF-8
        what = f"sentencepiece rejects the vocabulary: {e}"
        raise vocab.error("tokenizer.ggml.tokens", what) from None


def _all_different(vocab: Vocab, types: npt.NDArray[np.int32]) -> GGUFArray:
    """Return the pieces, with another name for each that is empty, a duplicate or too long:
    sentencepiece refuses these, and no text is encoded as them. Changes ``types``; adds warnings.
    """
    seen: set[bytes] = set()
    pieces = []
    for token in range(vocab.n):
        piece = vocab.raw(token)
        if not piece or piece in seen or len(piece) > _MAX_PIECE:
            why = "empty" if not piece else "a duplicate" if piece in seen else "very long"
            vocab.warnings.append(f"token {token} is {why}: no text is encoded as it")
            piece = b"<treadle:token:%d>" % token
            if types[token] != TokenType.UNKNOWN:
                types[token] = TokenType.UNUSED
        seen.add(piece)
        pieces.append(piece)
    return string_array(pieces)


def model_proto(
    vocab: Vocab, tokens: GGUFArray, types: npt.NDArray[np.int32], fallback: bool
) -> bytes:
    """Return the serialised sentencepiece ModelProto of the pieces ``tokens``: BPE, identity
    normaliser, no dummy prefix.

    ``types`` int32 [n]: TokenType of each piece; if none is UNKNOWN, one is added at the end with
    id n. ``fallback``: whether characters without a piece become byte pieces.
    """
    starts, sizes = tokens.offsets()
    records = np.empty(vocab.n, _RECORD)
    records["tag"] = records["piece_tag"] = 0x0A
    records["score_tag"] = 0x15
    records["type_tag"] = 0x18
    records["size"] = _varints(sizes + 11)
    records["score"] = vocab.scores
    records["type"] = types
    records["piece_size"] = _varints(sizes)

    # A GGUF string is 8 bytes of length and its bytes: each record replaces the 8 by 15 bytes.
    payload = tokens.payload
    heads = starts - int(starts[0])
    places = heads + (_RECORD.itemsize - 8) * np.arange(vocab.n)
    proto = np.empty(len(payload) + (_RECORD.itemsize - 8) * vocab.n, np.uint8)
    windows(proto, _RECORD.itemsize)[places] = records.view(f"V{_RECORD.itemsize}")
    proto[_outside(len(proto), places, _RECORD.itemsize)] = payload[
        _outside(len(payload), heads, 8)
    ]
    unknown = b"" if (types == TokenType.UNKNOWN).any() else _unknown_record(vocab)
    trainer = _TRAINER + bytes([fallback])
    return b"".join((proto.tobytes(), unknown, trainer, _NORMALIZER))


def _varints(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return ``values`` as protobuf varints of three bytes each, uint8 [n, 3]."""
    digits = np.empty((len(values), 3), np.uint8)
    digits[:, 0] = values & 127 | 128
    digits[:, 1] = values >> 7 & 127 | 128
    digits[:, 2] = values >> 14
    return digits


def _outside(n_bytes: int, places: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [n_bytes]: True for all bytes but the ``size`` bytes at each of
    ``places``.
    """
    mask = np.ones(n_bytes, np.uint8)
    windows(mask, size)[places] = np.zeros(1, f"V{size}")[0]
    return mask.view(np.bool_)


def _unknown_record(vocab: Vocab) -> bytes:
    name = b"<treadle:unknown:%d>" % vocab.n  # must differ from every piece
    body = b"\x0a" + bytes([len(name)]) + name + b"\x18" + bytes([TokenType.UNKNOWN])
    return b"\x0a" + bytes([len(body)]) + body
