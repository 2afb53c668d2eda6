"""Vocabulary of a GGUF file: its pieces, their types, and ids with a special meaning.

The arrays stay in the mapped file. Operations on all pieces run in numpy on their bytes: a
vocabulary of 262,144 pieces must not cost 262,144 Python objects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.errors import UnsupportedError
from treadle.files.metadata import GGUFArray, MetadataReader, ValueType

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF


class TokenType(enum.IntEnum):
    """Token types, in GGUF's numbers; sentencepiece's are the same."""

    NORMAL = 1
    UNKNOWN = 2  # stands for text without a piece
    CONTROL = 3  # adds no text; plain text is never encoded as it
    USER_DEFINED = 4  # always found as a whole in a text
    UNUSED = 5
    BYTE = 6  # one byte, spelt <0x00> to <0xFF>


# Names of tokens that end a turn, a text or a tool call. Files name only one or two of them by key,
# and often type them as ordinary pieces. The first that exists is the end of a turn.
END_OF_TURN = (
    b"<|eot_id|>",
    b"<|eot|>",  # Llama 4
    b"<|im_end|>",
    b"<end_of_turn>",
    b"<|end|>",
    b"<|end_of_text|>",
    b"<|endoftext|>",
    b"<EOT>",
    b"_<EOT>",
    b"[EOT]",
    "<｜end▁of▁sentence｜>".encode(),
    b"<end_of_utterance>",
    b"<|assistant_end|>",  # NanoChat
)
END_OF_GENERATION = (
    *END_OF_TURN,
    b"<|eom_id|>",
    b"<|eom|>",
    b"<|return|>",
    b"<|call|>",
    b"<|flush|>",  # Solar Open, also the next
    b"<|calls|>",
    b"[EOS]",
    b"</s>",
    b"<|fim_pad|>",
    b"<fim-pad>",
    b"<fim_pad>",
    b"<|repo_name|>",
    b"<|fim_repo|>",
    b"<fim-repo>",
    b"<reponame>",
    b"<|file_sep|>",
)
# Tokens that end an answer of several messages: gpt-oss's, Solar Open's.
_OF_MESSAGES = (b"<|return|>", b"<|call|>"), (b"<|flush|>", b"<|calls|>")
# GGUF has no keys for the white space that transformers' added tokens drop around them. These list
# the ids of tokens that drop it before them, and after them; ``treadle convert`` writes them.
LSTRIP = "treadle.tokens.lstrip"
RSTRIP = "treadle.tokens.rstrip"
SPACES = "treadle.tokens.spaces"  # the steps of normalization (``normalizer.py``)
BEFORE = "treadle.tokens.before"  # ids put before a text in place of BOS: ChatGLM's two
# Phi 3 and 3.5 have such tokens, but files of other converters do not say so. By architecture and
# vocabulary: the control tokens and added pieces that keep white space after them.
_RSTRIP = dict.fromkeys(
    (("phi3", "llama"), ("phimoe", "llama")), (b"<unk>", b"<s>", b"<|endoftext|>")
)
NONE = ("no_vocab", "none")  # tokenizer.ggml.model of files that have no vocabulary
# Keys of tokens that end generation too, if the file has them.
_EOG_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def has_vocabulary(gguf: GGUF) -> bool:
    """Return whether a file states that it has a vocabulary, of any kind."""
    return gguf.metadata.get("tokenizer.ggml.model", NONE[0]) not in NONE


class Vocab(MetadataReader):
    """Checked contents of a file's ``tokenizer.ggml.*`` keys; ids are positions in its arrays.

    ``n``: number of pieces; ``types`` int32 [n] (TokenType); ``scores`` float32 [n] or None;
    ``specials`` maps ``bos``, ``eos``, ``unk`` ... to ids; ``eog``: the ids that end generation.
    Raises FileError (keys missing, damaged, or inconsistent) and UnsupportedError (no vocabulary).
    """

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf.metadata, gguf.path)
        self.arch = self.text("general.architecture", "")
        self.model = self.text("tokenizer.ggml.model")
        if self.model in NONE:
            raise UnsupportedError(f"{self.path}: the model has no vocabulary ({self.model})")
        self.tokens = self._array("tokenizer.ggml.tokens", ValueType.STRING)
        self.n = len(self.tokens)
        if self.n == 0:
            self.fail("tokenizer.ggml.tokens", "is empty", "at least one piece")
        self.starts, self.sizes = self.tokens.offsets()
        self.types = self._types()
        self.scores = self._scores()
        self.warnings: list[str] = []
        self.specials = self._specials()
        self.eog = self._find_eog()

    # -- metadata -----------------------------------------------------------------------

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean ``key`` of the metadata, ``default`` if it is missing. Raises
        FileError for another type.
        """
        value = self.values.get(key, default)
        if not isinstance(value, (bool, int)):
            self.fail(key, f"is {value!r}", "a boolean")
        return bool(value)

    def _array(self, key: str, *types: ValueType) -> GGUFArray:
        value = self.values.get(key)
        wanted = " or ".join(f"[{t.name}]" for t in types)
        if value is None:
            self.fail(key, "is missing", wanted)
        if not isinstance(value, GGUFArray) or value.type not in types:
            self.fail(key, f"is {value!r}", wanted)
        return value

    def merges(self) -> GGUFArray:
        """Return the BPE merges, each a string "left right". Raises FileError if the file has
        none.
        """
        return self._array("tokenizer.ggml.merges", ValueType.STRING)

    def _column(self, key: str, *types: ValueType) -> npt.NDArray[Any] | None:
        """Return the numeric array ``key`` [n], an entry for every token; None if the file has
        none. Raises FileError if it is shorter, or not one of ``types``.
        """
        if key not in self.values:
            return None
        array = self._array(key, *types)
        if len(array) < self.n:
            self.fail(key, f"has {len(array)} entries", f"one for each of {self.n} tokens")
        return array.numpy()[: self.n]

    def _types(self) -> npt.NDArray[np.int32]:
        types = self._column("tokenizer.ggml.token_type", ValueType.INT32, ValueType.UINT32)
        if types is None:
            return np.full(self.n, TokenType.NORMAL, np.int32)
        types = types.astype(np.int32)
        types[(types < 1) | (types > 6)] = TokenType.NORMAL  # 0 is ggml's "undefined"
        return types

    def _scores(self) -> npt.NDArray[np.float32] | None:
        key = "tokenizer.ggml.scores"
        scores = self._column(key, ValueType.FLOAT32, ValueType.FLOAT64, ValueType.INT32)
        if scores is None:
            return None
        if not np.isfinite(scores).all():
            self.fail(key, "has a score that is not finite")
        return scores.astype(np.float32)

    # -- pieces -------------------------------------------------------------------------

    def raw(self, token: int) -> bytes:
        """Return the bytes by which the file spells a piece. Raises IndexError for an id outside
        the vocabulary.
        """
        if not 0 <= token < self.n:
            raise IndexError(f"token {token}: the vocabulary has {self.n} tokens")
        return self.tokens.raw(token)

    def raws(self) -> list[bytes]:
        """Return the bytes of all pieces, [n]."""
        return self.tokens.raws()

    def of_type(self, *types: TokenType) -> list[int]:
        """Return the ids of all pieces of these types, ascending."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def unspellable(self) -> list[int]:
        """Return the ids that plain text is never encoded as, ascending: control tokens, the
        unknown token and unused pieces.
        """
        return self.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)

    def find(self, names: Iterable[bytes]) -> dict[bytes, int]:
        """Return the ids of the pieces that are spelt exactly as one of ``names``, by name; of
        duplicates the first.
        """
        wanted = {name for name in names if name}
        longest = max(map(len, wanted), default=0)
        is_size = np.zeros(longest + 2, np.bool_)  # the last one stands for all longer pieces
        is_size[[len(name) for name in wanted]] = True
        begins = np.zeros(256, np.bool_)
        begins[[name[0] for name in wanted]] = True
        near = np.flatnonzero(is_size[np.minimum(self.sizes, longest + 1)])
        near = near[begins[self.tokens.buffer[self.starts[near]]]]
        found: dict[bytes, int] = {}
        tokens = near.tolist()
        for token, raw in zip(tokens, self.tokens.raws(tokens), strict=True):
            if raw in wanted:
                found.setdefault(raw, token)
        return found

    def trimming(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return two sets of token ids: those that drop white space before them in a text, and
        after them.
        """
        left, right = (frozenset(self.ids(key)) for key in (LSTRIP, RSTRIP))
        kept = _RSTRIP.get((self.arch, self.model))
        if kept is not None and LSTRIP not in self.values and RSTRIP not in self.values:
            named = self.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
            right = frozenset(named).difference(self.find(kept).values())
        return left, right

    def ids(self, key: str) -> list[int]:
        """Return the ids listed by ``key``, one of treadle's own keys; [] if the file lacks it.
        Raises FileError for another type, or for an id outside the vocabulary.
        """
        if key not in self.values:
            return []
        ids: list[int] = self._array(key, ValueType.INT32, ValueType.UINT32).numpy().tolist()
        if wrong := [i for i in ids if not 0 <= i < self.n]:
            self.fail(key, f"has {wrong[0]}", f"ids below {self.n}")
        return ids

    def _specials(self) -> dict[str, int]:
        prefix = "tokenizer.ggml."
        suffix = "_token_id"
        found: dict[str, int] = {}
        for key in self.values:
            if not (key.startswith(prefix) and key.endswith(suffix)):
                continue
            value = self.values[key]
            if not isinstance(value, int) or isinstance(value, bool):
                self.fail(key, f"is {value!r}", "a token id")
            name = key[len(prefix) : -len(suffix)]
            if 0 <= value < self.n:
                found[_SPELLINGS.get(name, name)] = value
            elif value not in (-1, 0xFFFFFFFF):  # converters write these for "none"
                self.warnings.append(f"{key} is {value}, outside the vocabulary: ignored")
        names = {k: v for k, v in _NAMES.get(self.model, {}).items() if k not in found}
        by_name = self.find(names.values()) if names else {}
        found.update((key, by_name[name]) for key, name in names.items() if name in by_name)
        return found

    def _find_eog(self) -> frozenset[int]:
        named = self.find(END_OF_GENERATION)
        slash_s = named.get(b"</s>")
        if slash_s is not None and self.types[slash_s] != TokenType.CONTROL:
            del named[b"</s>"]  # Gemma's is the HTML tag
        if any(all(name in named for name in names) for names in _OF_MESSAGES):
            named.pop(b"<|end|>", None)  # it ends a message, not the answer
        # Such a token is a control token whatever its type in the file: text must not spell it.
        self.types[list(named.values())] = TokenType.CONTROL
        if "eot" not in self.specials:
            for name in END_OF_TURN:
                if name in named:
                    self.specials["eot"] = named[name]
                    break
        keyed = (self.specials[key] for key in _EOG_KEYS if key in self.specials)
        return frozenset(named.values()).union(keyed)


# The misspelt key is GGUF's official one; older files have the names on the left.
_SPELLINGS = {
    "seperator": "sep",
    "separator": "sep",
    "padding": "pad",
    "unknown": "unk",
}

# Names that have a fixed role in every such vocabulary, for files that name no id by key.
_NAMES = {
    "llama": {"bos": b"<s>", "eos": b"</s>", "unk": b"<unk>"},
    "bert": {"cls": b"[CLS]", "sep": b"[SEP]", "unk": b"[UNK]", "pad": b"[PAD]"},
}


def joined(array: GGUFArray, mark: str = "\n") -> npt.NDArray[np.uint8]:
    """Return all strings of an array, separated by ``mark``, an ASCII character, as UTF-8 bytes."""
    if len(array) == 0:
        return np.empty(0, np.uint8)
    payload = array.payload.copy()
    heads = array.offsets()[0] - 8
    heads -= heads[0]
    # The eight length bytes before each string are reduced to one mark.
    payload[heads + 7] = ord(mark)
    keep = np.ones(len(payload), np.uint8)
    windows(keep, 8)[heads] = np.array([0, 0, 0, 0, 0, 0, 0, 1], np.uint8).view("V8")[0]
    kept: npt.NDArray[np.uint8] = payload[keep.view(np.bool_)]
    return kept[1:]


def texts(array: GGUFArray, mark: str = "\n") -> list[str]:
    """Return all strings of an array as text, with U+FFFD for invalid UTF-8. It is fast if none
    contains the character ``mark``, at which the joined strings are split.
    """
    lines = joined(array, mark).tobytes().decode("utf-8", "replace").split(mark)
    if len(lines) == len(array):
        return lines
    return [array.raw(i).decode("utf-8", "replace") for i in range(len(array))]


def windows(buffer: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.void]:
    """Return a view of every run of ``size`` bytes of ``buffer``, overlapping: void [len - size +
    1].

    Indexed by offsets, it reads or writes one record of ``size`` bytes at each of them.
    """
    return np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer.data, strides=(1,))
