"""Text to token ids and back, for every kind of vocabulary in GGUF files."""

from __future__ import annotations

import abc
import codecs
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.base.caller_warnings import warn
from treadle.base.fast_classes import cached_property
from treadle.errors import UnsupportedError
from treadle.tokenizer.vocab import BEFORE, TokenType, Vocab

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF


T = TypeVar("T")
MAX_SHOWN = 8  # characters that a warning lists
# White space as in Rust: Python's without four control characters.
WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
WHITE += "".join(map(chr, range(0x2000, 0x200B)))
# tokenizer.ggml.model -> its module and class, imported when a file needs it.
MODELS = {
    "llama": ("spm", "SpmTokenizer"),
    "gpt2": ("bpe", "BpeTokenizer"),
    "bert": ("wordpiece", "WordPieceTokenizer"),
    "t5": ("unigram", "UnigramTokenizer"),
    "gemma4": ("bpe_chars", "MergedTokenizer"),
    "whitespace": ("bpe_whitespace", "UnspacedTokenizer"),
    "rwkv": ("rwkv_world", "LongestTokenizer"),
}
# Exceptions by tokenizer.ggml.pre.
PRE = "tokenizer.ggml.pre"
_BY_PRE = {
    ("gpt2", "gemma4"): ("bpe_chars", "MergedTokenizer"),
    ("gpt2", "granite-embed-multi-311m"): ("bpe_chars", "MergedTokenizer"),
    ("gpt2", "sarvam-moe"): ("bpe_chars", "PlainMergedTokenizer"),
}


class SpecialTokenSplitter:
    """Splits text at every occurrence of the pieces in ``ids``, a map to their ids, leftmost first;
    of several, at the longest.

    Thousands of pieces (Gemma has over 6,000) make a slow regular expression. So the expression
    only finds the first two characters of any piece, and a dict does the rest.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {piece: token for piece, token in ids.items() if piece}
        sizes: dict[str, set[int]] = defaultdict(set)
        for piece in self._ids:
            sizes[piece[:2]].add(len(piece))
        self._sizes = {head: sorted(of, reverse=True) for head, of in sizes.items()}
        seconds: dict[str, str] = defaultdict(str)
        for head in self._sizes:
            seconds[head[0]] += head[1:]
        alternatives = [
            re.escape(first) + (f"[{re.escape(more)}]" if more and first not in self._sizes else "")
            for first, more in sorted(seconds.items())
        ]
        self._heads = re.compile("|".join(alternatives)) if alternatives else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of ``text`` in order: text between pieces (never empty), and the pieces'
        ids.
        """
        done = at = 0
        while self._heads and (near := self._heads.search(text, at)):
            at = near.start()
            piece = self._piece_at(text, at)
            if piece is None:
                at += 1
                continue
            if done < at:
                yield text[done:at]
            yield self._ids[piece]
            done = at = at + len(piece)
        if done < len(text):
            yield text[done:]

    def _piece_at(self, text: str, at: int) -> str | None:
        for head in (text[at : at + 2], text[at]):
            for size in self._sizes.get(head, ()):
                piece = text[at : at + size]
                if piece in self._ids:
                    return piece
        return None


def load_tokenizer(gguf: GGUF) -> Tokenizer:
    """Return the tokenizer that an open model file describes.

    Raises FileError for arrays that are missing, damaged or inconsistent; UnsupportedError for a
    kind of vocabulary or a pre-tokenizer that treadle does not support, or if there is no
    vocabulary.
    """
    if "tokenizer.ggml.model" not in gguf.metadata:
        raise UnsupportedError(
            f"{gguf.path}: the file has no tokenizer (no key tokenizer.ggml.model)"
        )
    vocab = Vocab(gguf)
    if vocab.model not in MODELS:
        raise UnsupportedError(
            f"{gguf.path}: tokenizer.ggml.model is {vocab.model!r}, "
            f"which treadle does not support (supported: {', '.join(MODELS)})"
        )
    module, name = _BY_PRE.get((vocab.model, vocab.text(PRE, "")), MODELS[vocab.model])
    loader: Callable[[Vocab], Tokenizer] = getattr(import_module(f".{module}", __package__), name)
    return loader(vocab)


class Tokenizer(abc.ABC):
    """Converter of text to ids and back. Token ids are ints in [0, n_vocab).

    ``bos eos eot unk pad sep`` are ids, None if the file has no such token; ``eog``: the ids that
    end generation; ``add_bos``, ``add_eos``, ``add_sep``: whether the file wants these tokens
    around a text; ``warnings``: problems found in the file; ``model`` and ``pre``: GGUF's names of
    the kind of vocabulary and of its pre-tokenizer.
    """

    adds_space = False  # the tokenizer puts a space before a text
    space_after_special = True  # also after special tokens
    tells_second = False  # the second text of a pair has its own type: BERT's, not RoBERTa's
    pre = ""

    def __init__(
        self, vocab: Vocab, *, add_bos: bool, add_eos: bool = False, add_sep: bool = False
    ) -> None:
        self.vocab = vocab
        self.model = vocab.model
        self.n_vocab = vocab.n
        self.warnings = vocab.warnings
        special = vocab.specials.get
        self.bos = special("bos", special("cls"))
        self.eos = special("eos")
        self.eot = special("eot")
        self.unk = special("unk")
        self.pad, self.sep = special("pad"), special("sep")
        self.eog = vocab.eog
        self._trimming, self._before = vocab.trimming(), vocab.ids(BEFORE)
        self._kinds = vocab.types.astype("u1").tobytes()  # faster than numpy for single items
        self._seen: dict[int, bytes] = {}
        prefix = "tokenizer.ggml.add_"
        self.add_bos = vocab.flag(f"{prefix}bos_token", add_bos) and self.bos is not None
        self.add_eos = vocab.flag(f"{prefix}eos_token", add_eos) and self.eos is not None
        self.add_sep = vocab.flag(f"{prefix}sep_token", add_sep) and self.sep is not None

    # -- interface of a kind of vocabulary ---------------------------------------------------

    @abc.abstractmethod
    def encode_plain(self, text: str, *, start: bool) -> list[int]:
        """Return the ids of ``text``, without a search for special tokens. ``start``: the text
        begins here, or, if ``space_after_special``, follows a special token, so that it may get a
        space in front.
        """

    @abc.abstractmethod
    def _bytes_of(self, token: int, raw: bytes) -> bytes:
        """Return the bytes that the token, spelt ``raw`` in the file, adds to a text; of control
        tokens, their names.
        """

    def prepare(self) -> None:
        """Build the library's tables now, so that no text waits for them later. Raises FileError if
        the library refuses the vocabulary.
        """
        return  # most kinds have nothing left to build

    # -- text to ids ----------------------------------------------------------------------

    def warn_of_extra_tokens(self, n_rows: int) -> None:
        """Warn if the vocabulary has more tokens than the model has rows of embeddings,
        ``n_rows``.
        """
        if self.n_vocab <= n_rows:
            return
        ends = [self.piece(token) for token in sorted(self.eog) if token >= n_rows][:4]
        lost = "it cannot generate the last of them"
        if ends:
            shown = ", ".join(map(repr, ends))
            lost = f"it cannot generate {shown}, so output that should end there does not stop"
        name = self.vocab.path.name
        n = self.n_vocab
        warn(f"{name}: the vocabulary has {n} tokens but the model only {n_rows}: {lost}")

    def warn_dropped(self, characters: Iterable[str]) -> None:
        """Warn of characters that were dropped from a text, since the vocabulary has no token for
        them.
        """
        different = dict.fromkeys(characters)
        shown = ", ".join(ascii(each) for each in islice(different, MAX_SHOWN))
        more = ", ..." if len(different) > MAX_SHOWN else ""
        if different:
            warn(f"the vocabulary has no token for {shown}{more}: dropped from the text")

    def encode(self, text: str, *, bos: bool | None = None, special: bool = False) -> list[int]:
        """Return the ids of ``text``.

        ``bos``: None adds the tokens that the file wants around a text (and no second BOS to a text
        that spells one), False adds nothing, True also adds a BOS that the file does not want, if
        there is one. ``special``: control tokens spelt in the text become those tokens; otherwise
        they are plain text, as untrusted text must be. User-defined pieces are found either way.
        """
        text = _without_surrogates(text)
        ids: list[int] = self._encode_split(self._splitter_at(special=special).split(text))
        return ids if bos is False else self._surround(ids, bos)

    def _encode_split(self, parts: Iterable[Any]) -> list[Any]:
        """Return the ids of a text that was split at tokens: ``parts`` are strings, and ids of
        tokens.
        """
        ids: list[Any] = []
        start = True
        for part in self._trimmed(parts):
            if isinstance(part, str):
                ids += self.encode_plain(part, start=start)
                start = False
            else:
                ids.append(part)
                start = self.space_after_special
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a chat template's output: control tokens that it spells become those
        tokens, and a BOS is added as by ``encode`` unless the text begins with one.
        """
        spelt = self.bos is not None and text.startswith(self.piece(self.bos))
        return self.encode(text, bos=False if spelt else None, special=True)

    def encode_prompt_pieces(self, pieces: Sequence[tuple[str, bool] | T]) -> list[int | T]:
        """Return the ids of a prompt in pieces, with BOS as by ``encode_prompt``.

        A piece is a text with a flag, whether control tokens and user-defined pieces that it spells
        become those tokens; or an object, kept as it is, that stands for other tokens, such as rows
        of a picture. Adjacent texts are tokenized as one.
        """
        parts: list[Any] = []
        for piece in pieces:
            if not isinstance(piece, tuple):
                parts.append(piece)
                continue
            text = _without_surrogates(piece[0])
            for part in self._all_specials.split(text) if piece[1] else [text]:
                if isinstance(part, str) and parts and isinstance(parts[-1], str):
                    parts[-1] += part
                else:
                    parts.append(part)
        ids: list[Any] = self._encode_split(parts)
        spelt = self.bos is not None and ids[:1] == [self.bos]
        return ids if spelt else self._surround(ids, None)

    def _trimmed(self, parts: Iterable[str | int]) -> Iterable[str | int]:
        """Return ``parts`` without the white space next to tokens that drop it
        (``Vocab.trimming``).
        """
        left, right = self._trimming
        if not left and not right:
            return parts
        made: list[str | int] = []
        for part in parts:
            if isinstance(part, str) and made and made[-1] in right:
                part = part.lstrip(WHITE)
            if part in left and made and isinstance(made[-1], str):
                made[-1] = made[-1].rstrip(WHITE)
            made.append(part)
        return [part for part in made if part != ""]

    def _surround(self, ids: list[Any], bos: bool | None) -> list[Any]:
        first: list[int] = []
        if self._before:
            first = self._before if ids[: len(self._before)] != self._before else []
        elif self.bos is not None and (bos or (self.add_bos and ids[:1] != [self.bos])):
            first = [self.bos]
        last = [self.eos] if self.add_eos and self.eos is not None else []
        if self.add_sep and self.sep is not None:
            last = [self.sep]
        return [*first, *ids, *last]

    def _splitter_at(self, *, special: bool) -> SpecialTokenSplitter:
        """Return the splitter of text at user-defined pieces and, if ``special``, at control
        tokens.
        """
        return self._all_specials if special else self._user_defined

    @cached_property
    def _user_defined(self) -> SpecialTokenSplitter:
        return SpecialTokenSplitter(self._spellings(TokenType.USER_DEFINED))

    @cached_property
    def _all_specials(self) -> SpecialTokenSplitter:
        defined = self._spellings(TokenType.USER_DEFINED)
        controls = self._spellings(TokenType.CONTROL, TokenType.UNKNOWN)
        return SpecialTokenSplitter(defined | controls)

    def _spellings(self, *types: TokenType) -> dict[str, int]:
        """Return the ids of tokens of these types by their text. Pieces that contain U+2581 are
        left out: it stands for a space in the text, so ``encode_plain`` finds them.
        """
        ids = self._ids(*types)
        texts = (raw.decode("utf-8", "replace") for raw in self.vocab.tokens.raws(ids))
        return {text: id for text, id in zip(texts, ids, strict=True) if "▁" not in text}

    def _ids(self, *types: TokenType) -> list[int]:
        return self.vocab.of_type(*types)

    # -- ids to text ----------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, special: bool = False, start: bool = True) -> str:
        """Return the text of ``ids``; control tokens are dropped unless ``special``.

        The inverse of ``encode`` if the vocabulary keeps all of a text: the space that encoding put
        before a text is removed. ``start`` False keeps it, for ids that continue a text. Invalid
        UTF-8 becomes U+FFFD. Raises IndexError for an id outside the vocabulary.
        """
        decoder = StreamDecoder(self, special=special, start=start)
        return "".join([*map(decoder.push, ids), decoder.flush()])

    @property
    def of_text(self) -> Tokenizer | None:
        """The tokenizer itself; None if no token has text (``NoVocabulary``)."""
        return self

    def starts(self, ids: Iterable[int]) -> list[int]:
        """Return, for each id, the offset in characters at which its text starts in
        ``decode(ids)``. Tokens that are parts of one character start where the character does.
        """
        decoder = StreamDecoder(self, start=True)
        result = []
        for id in ids:
            decoder.push(id)
            result.append(decoder.at)
        return result

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token adds to a text, perhaps part of a character; of control
        tokens, their names. Raises IndexError for an id outside the vocabulary.
        """
        data = self._seen.get(token)
        if data is None:
            data = self._seen[token] = self._bytes_of(token, self.vocab.raw(token))
        return data

    def all_token_bytes(self) -> list[bytes]:
        """Return the ``token_bytes`` of every token, in order, [n_vocab]."""
        return [self._bytes_of(token, raw) for token, raw in enumerate(self.vocab.raws())]

    def piece(self, token: int) -> str:
        """Return the token as the file spells it, for display: "▁the", "Ġthe", "<0x0A>". Raises
        IndexError for an id outside the vocabulary.
        """
        return self.vocab.raw(token).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        """Return whether the token is a control token, which adds no text. Raises IndexError for an
        id outside the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token}: the vocabulary has {self.n_vocab} tokens")
        return self._kinds[token] == TokenType.CONTROL

    def is_special(self, token: int) -> bool:
        """Return whether the token is a control token or a user-defined piece: ``encode`` with
        ``special`` splits text at these.
        """
        return token in self._cuts

    @cached_property
    def _cuts(self) -> frozenset[int]:
        controls = self._ids(TokenType.CONTROL)
        return frozenset(controls).union(self._spellings(TokenType.USER_DEFINED).values())

    def cut(self, text: str) -> list[str | int]:
        """Return ``text`` in parts: strings, and the ids of the control tokens that it spells."""
        parts: list[str | int] = []
        for part in self._all_specials.split(text):
            if isinstance(part, int) and not self.is_control(part):
                part = self.piece(part)
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts

    def token_id(self, piece: str) -> int | None:
        """Return the id of the piece that the file spells ``piece``, or None if there is none."""
        name = piece.encode()
        return self.vocab.find([name]).get(name) if name else None


class StreamDecoder:
    """Incremental decoder of ids; its joined output is that of ``tokenizer.decode`` for all ids.

    A token may end inside a UTF-8 character (byte fallback, byte-level BPE); its bytes wait for the
    rest. Invalid UTF-8 becomes U+FFFD as in ``bytes.decode(errors="replace")``. With ``special``
    all control tokens are shown by name, else those in ``shown``. ``start``: a text begins here, so
    the space that the tokenizer itself put there is dropped (generated ids continue a text).

    ``at``: start of the last token, in characters of the text; tokens that share a character start
    where it does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool = False,
        shown: Container[int] = (),
        start: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown = shown
        self._strip = start and tokenizer.adds_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = self._n = 0  # characters before the last token, and up to its end

    def push(self, token: int) -> str:
        """Return the text that becomes complete with ``token``; often empty. Raises IndexError for
        an id outside the vocabulary.
        """
        data = self._tokenizer.token_bytes(token)
        self.at = self._n
        if self._tokenizer.adds_space:
            special = self._tokenizer.is_special(token)
            if self._strip and not special:
                data = data.removeprefix(b" ")
            self._strip = special and (self._strip or self._tokenizer.space_after_special)
        if self._tokenizer.is_control(token) and not (self._special or token in self._shown):
            return ""
        if data and data[0] & 0xC0 != 0x80 and self._utf8.getstate()[0]:
            self.at += 1  # after the U+FFFD of a character that is cut off here
        text = self._utf8.decode(data)
        self._n += len(text)
        return text

    def flush(self) -> str:
        """End an unfinished character: return U+FFFD, or "" if there is none. More ids may
        follow.
        """
        text = self._utf8.decode(b"", final=True)
        self._n += len(text)
        return text


def _without_surrogates(text: str) -> str:
    """Return ``text`` with pairs of surrogates replaced by their character, and lone ones, which no
    encoding has, by U+FFFD.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return codecs.decode(text.encode("utf-16", "surrogatepass"), "utf-16", "replace")
    return text
