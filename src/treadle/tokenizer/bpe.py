"""Byte-level BPE vocabularies (``gpt2``): GPT-2's scheme, run by ``tokenizers``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from treadle.base.fast_classes import cached_property
from treadle.errors import UnsupportedError
from treadle.files.metadata import GGUFArray
from treadle.tokenizer.pretokenizers import (
    DEFAULT,
    PRE_OF_ARCH,
    PRE_OF_PIECE,
    PRE_TOKENIZERS,
    PreTokenizer,
)
from treadle.tokenizer.short_texts import (
    AsciiSplitter,
    LibraryNeeded,
    ShortTexts,
    StringIndex,
    merge,
)
from treadle.tokenizer.tokenizer import PRE, Tokenizer
from treadle.tokenizer.vocab import SPACES, TokenType, Vocab, joined, texts


def _byte_letters() -> dict[str, int]:
    """Return the byte that each of GPT-2's letters stands for. A printable byte is its own letter;
    the others have the letters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return {chr(b): b for b in printing} | {chr(256 + i): b for i, b in enumerate(others)}


MERGES = "tokenizer.ggml.merges"
KNOWN = "merges of known pieces into known pieces"
UNKNOWN = " "  # internal name of the unknown token: spaces have another letter there
BYTE_OF_LETTER = _byte_letters()
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


class BpeTokenizer(Tokenizer):
    """Byte-level BPE: text is split into words by the expressions of the vocabulary's family
    (``PreTokenizer``); a word's bytes, as letters, are merged pair by pair.
    """

    def __init__(self, vocab: Vocab) -> None:
        self.pre, family = _family(vocab)
        super().__init__(vocab, add_bos=family.add_bos, add_sep=family.add_sep)
        self._family = family
        self.adds_space = vocab.text(SPACES, "never") == "always"
        _check_merges(vocab)
        self._short = ShortTexts(vocab.n)
        self._merger: RankedMerger | None = None
        try:
            if self._short.are_left:
                self._merger = RankedMerger(vocab, ignore_merges=family.ignore_merges)
        except LibraryNeeded:
            pass
        if self._merger is None:
            self.prepare()

    def prepare(self) -> None:
        """Build the tables of ``tokenizers``. Raises FileError for damaged merges."""
        assert self._tokenizer is not None
        self._merger = None

    @cached_property
    def _tokenizer(self) -> Any:
        """The encoder of the library ``tokenizers``, built on first use."""
        return _build(self.vocab, self._family)

    @cached_property
    def _lost(self) -> frozenset[int]:
        """The bytes without a piece, which ``tokenizers`` drops silently."""
        never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # in no UTF-8
        find = self._tokenizer.token_to_id
        return frozenset(b for c, b in BYTE_OF_LETTER.items() if b not in never and find(c) is None)

    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``. If ``start`` and the vocabulary wants it, a text that begins
        without a space gets one.
        """
        if start and self.adds_space and text and not text.startswith(" "):
            text = f" {text}"
        merger = self._merger  # ``prepare`` may drop it in another thread
        if merger is not None:
            if self._short.take(text):
                words = self._words(text)
                with suppress(LibraryNeeded):
                    return [id for word in words for id in merger.encode(word.encode())]
            self.prepare()
        if self._lost and not self._lost.isdisjoint(text.encode()):
            text = self._without_lost(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _words(self, text: str) -> list[str]:
        """Return the words of a text, their bytes as letters."""
        if text.isascii() and self._ascii_splitter is not None:
            return [word.translate(LETTER_OF_BYTE) for word in self._ascii_splitter.split(text)]
        return [word for word, _ in self._splitter.pre_tokenize_str(text)]

    @cached_property
    def _ascii_splitter(self) -> AsciiSplitter | None:
        """The splitter of ASCII text; None if only the library reads the family's expressions."""
        try:
            return AsciiSplitter(self._family.patterns)
        except LibraryNeeded:
            return None

    @cached_property
    def _splitter(self) -> Any:
        """The splitter of text into words by the library ``tokenizers``, with bytes as letters."""
        return _splitter(self._family)

    def _without_lost(self, text: str) -> str:
        """Return ``text`` without characters that the vocabulary cannot spell completely, with a
        warning. Characters of one byte stay: tokenizers drops them after it has split the text into
        words.
        """
        lost = {each for each in set(text) if not self._lost.isdisjoint(each.encode())}
        self.warn_dropped(each for each in text if each in lost)
        return text.translate({ord(each): None for each in lost if not each.isascii()})

    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """Return the bytes that the letters of an ordinary piece, ``raw``, stand for; ``raw``
        itself if not all are byte letters, or for another type of piece.
        """
        if self._kinds[token] == TokenType.NORMAL:
            try:
                return raw.decode().translate(self._latin).encode("latin-1")
            except UnicodeError:  # not all of it is byte letters
                return raw
        return raw

    @cached_property
    def _latin(self) -> dict[int, int]:
        """Map from the code of each of GPT-2's letters to the Latin-1 character of its byte. Other
        characters up to 255 map past Latin-1, so that encoding them fails.
        """
        table = {ord(letter): byte for letter, byte in BYTE_OF_LETTER.items()}
        return {c: 0x2FF for c in range(256)} | table


def _family(vocab: Vocab) -> tuple[str, PreTokenizer]:
    """Return the name and the rules of the file's pre-tokenizer; if its key is missing, a guess,
    with an entry in ``vocab.warnings``. Raises UnsupportedError for an unknown name.
    """
    name = vocab.text(PRE, "")
    if not name:
        pieces = vocab.find(PRE_OF_PIECE)
        guesses = (PRE_OF_PIECE[piece] for piece in PRE_OF_PIECE if piece in pieces)
        name = PRE_OF_ARCH.get(vocab.arch) or next(guesses, DEFAULT)
        vocab.warnings.append(
            f"{PRE} is missing: {name!r} is a guess; if it is wrong, text is split differently "
            "from what the model was trained on"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{vocab.path}: pre-tokenizer {name!r} is not supported ({PRE}); using another one "
            "would silently produce wrong tokens"
        )
    return name, PRE_TOKENIZERS[name]


class RankedMerger:
    """Encoder of single words by the file's merges, without the library's tables.
    ``ignore_merges``: as in ``PreTokenizer``. Raises LibraryNeeded if two pieces are spelt alike.
    """

    def __init__(self, vocab: Vocab, *, ignore_merges: bool) -> None:
        self._vocab = vocab
        self._ignore_merges = ignore_merges
        self._pieces = StringIndex(vocab.tokens)
        self._merges = StringIndex(vocab.merges())
        self._never = frozenset(vocab.unspellable())

    def encode(self, word: bytes) -> list[int]:
        """Return the ids of a word of byte letters, in UTF-8. Raises LibraryNeeded for a letter
        without a piece, FileError for a merge into something that is not a piece.
        """
        if self._ignore_merges:
            whole = self._pieces.get(word)
            if whole is not None and whole not in self._never:
                return [whole]
        letters = [letter.encode() for letter in word.decode()]
        ids = []
        for symbol in merge(letters, self._rank):
            id = self._pieces.get(symbol)
            if id is None or id in self._never:
                raise LibraryNeeded
            ids.append(id)
        return ids

    def _rank(self, left: bytes, right: bytes) -> int | None:
        rank = self._merges.get(left + b" " + right)
        if rank is None:
            return None
        made = self._pieces.get(left + right)
        if made is None:
            what = f"has {self._vocab.merges().raw(rank)!r}"
            self._vocab.fail(MERGES, what, KNOWN)
        return None if made in self._never else rank


def _check_merges(vocab: Vocab) -> None:
    """Raise FileError for a merge into more bytes than any piece has: ``tokenizers`` would
    panic.
    """
    longest = int(vocab.merges().offsets()[1].max(initial=0)) - 1
    if longest > int(vocab.sizes.max()):
        vocab.fail(MERGES, f"has a merge into {longest} bytes", "merges into known pieces")


def _splitter(family: PreTokenizer) -> Any:
    """Return the family's pre-tokenizer for the library ``tokenizers``."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), "isolated") for pattern in family.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _build(vocab: Vocab, family: PreTokenizer) -> Any:
    from tokenizers import Tokenizer

    pairs = merge_pairs(vocab.merges())
    try:
        model = merge_model(vocab, pairs, ignore_merges=family.ignore_merges)
    except Exception as e:  # tokenizers raises plain Exception
        raise vocab.error(MERGES, str(e), KNOWN) from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter(family)
    return tokenizer


def merge_model(
    vocab: Vocab,
    pairs: list[tuple[str, str]],
    mark: str = "\n",
    unk: int | None = None,
    **settings: Any,
) -> Any:
    """Return a BPE model for ``tokenizers`` of the pieces that plain text may become, with the
    merges ``pairs``. ``mark``: see ``texts``; ``unk``: id of text without a piece, None if no
    token is; ``settings``: other arguments of ``tokenizers.models.BPE``. Of pieces that are spelt
    alike the first wins; merges that involve a control, unknown or unused piece are left out if the
    library refuses them.

    Raises Exception, as tokenizers does, for merges of, or into, something that is not a piece.
    """
    from tokenizers.models import BPE

    pieces = texts(vocab.tokens, mark)
    never = vocab.unspellable()
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(ids) != len(pieces):
        vocab.warnings.append(f"{len(pieces) - len(ids)} pieces are duplicates: the first ones win")
        hidden = frozenset(never)
        several = reversed(list(enumerate(pieces)))
        ids = {piece: i for i, piece in several if i not in hidden}
    else:
        for i in never:
            del ids[pieces[i]]
    lost = {pieces[i] for i in never}.difference(ids)
    if unk is not None:
        ids[UNKNOWN] = unk
        settings["unk_token"] = UNKNOWN
    try:
        return BPE(ids, pairs, **settings)
    except Exception:  # tokenizers raises plain Exception
        if not lost:
            raise
    # For example a merge into a control token: without it no text becomes that token.
    kept = [(a, b) for a, b in pairs if lost.isdisjoint((a, b, a + b))]
    return BPE(ids, kept, **settings)


def merge_pairs(merges: GGUFArray) -> list[tuple[str, str]]:
    """Return the merges "left right" as pairs, in order of rank, without those that have no space.
    Raises UnicodeDecodeError for a merge that is not UTF-8.
    """
    lines = joined(merges)
    marks = lines[(lines == 0x20) | (lines == 0x0A)]
    if len(marks) == 2 * len(merges) - 1 and (marks[::2] == 0x20).all():
        if not (marks[1::2] == 0x0A).all():
            return _pairs_one_by_one(merges)
        words = lines.tobytes().decode().replace("\n", " ").split(" ")
        return list(zip(words[::2], words[1::2], strict=True))
    return _pairs_one_by_one(merges)


def _pairs_one_by_one(merges: GGUFArray) -> list[tuple[str, str]]:
    pairs = []
    for i in range(len(merges)):
        line = merges.raw(i).decode()
        cut = line.find(" ", 1)  # the left side may begin with a space
        if cut > 0:
            pairs.append((line[:cut], line[cut + 1 :]))
    return pairs
