"""A Whisper model of any file format, with the interface of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.convert.whisper.languages import special_names, timestamp_name
from treadle.convert.whisper.names import ARCH, DEC, EMBEDDINGS, ENC, POSITIONS
from treadle.errors import FileError
from treadle.files.gguf import GGUF
from treadle.files.mapping import MappedFile, Mappings
from treadle.files.metadata import GGUFArray, ValueType, number_array, string_array
from treadle.files.tensor import Tensor
from treadle.tokenizer.vocab import BEFORE, TokenType

SUPPRESS = f"{ARCH}.suppress_tokens"
BEGIN_SUPPRESS = f"{ARCH}.begin_suppress_tokens"
ALIGNMENT_HEADS = f"{ARCH}.alignment_heads"  # (layer, head) pairs, flat
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
END = b"<|endoftext|>"
EPS = 1e-5  # of all LayerNorms; no file has it

_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("'),
    *("((", "))", "(((", ")))", "[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
)
_NOTES = "♩♪♫♬♭♮♯"
_INSIDE_WORDS = " -", " '"


@dataclass(frozen=True)
class WhisperSizes:
    """Sizes that a file states and that do not follow from its tensors."""

    n_encoder_layer: int
    n_decoder_layer: int
    n_encoder_head: int
    n_decoder_head: int


class WhisperFile(GGUF):
    """A Whisper model: tensors in the mapped files under treadle's names, and a GGUF file's keys.

    ``merges`` computes the tokenizer's merges, which takes half a second, for files without them.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        maps: Mappings,
        merges: Callable[[], list[str]] | None = None,
    ) -> None:
        self.path = path
        self.paths = [file.path for file in maps.files]
        self.version = 3
        self.alignment = 1
        self.header_only = False
        self.n_bytes = sum(len(file) for file in maps.files)
        self.metadata = dict(metadata)
        self.types = {}
        self.tensors = dict(tensors)
        self._files = []
        self._maps = maps
        self._merges = merges

    def with_merges(self) -> None:
        """Add the key of the tokenizer's merges, if the file lacks it."""
        if self._merges is not None and MERGES not in self.metadata:
            made = string_array([text.encode() for text in self._merges()])
            self.metadata = {**self.metadata, MERGES: made}


def maps_of(files: Sequence[MappedFile]) -> Mappings:
    """Return the mappings of a model's files, to check and close together."""
    return Mappings(files)


def model_keys(path: Path, tensors: Mapping[str, Tensor], sizes: WhisperSizes) -> dict[str, Any]:
    """Return the model's keys: those in the GGUF specification's section on Whisper, with sizes
    taken from the tensors.

    Raises FileError for a missing tensor, or one with another number of dimensions.
    """
    conv = _shape(path, tensors, f"{ENC}conv1d.1.weight", 3)
    n_audio_ctx, n_embd = _shape(path, tensors, f"{ENC}{POSITIONS}", 2)
    n_text_ctx, n_embd_text = _shape(path, tensors, f"{DEC}{POSITIONS}", 2)
    n_vocab, _ = _shape(path, tensors, f"{EMBEDDINGS}.weight", 2)
    keys: dict[str, Any] = {
        "vocab_size": n_vocab,
        "encoder.mels_count": conv[1],
        "encoder.context_length": n_audio_ctx,
        "encoder.embedding_length": n_embd,
        "encoder.block_count": sizes.n_encoder_layer,
        "encoder.attention.head_count": sizes.n_encoder_head,
        "encoder.feed_forward_length": _shape(path, tensors, f"{ENC}blk.0.ffn_up.weight", 2)[0],
        "decoder.context_length": n_text_ctx,
        "decoder.embedding_length": n_embd_text,
        "decoder.block_count": sizes.n_decoder_layer,
        "decoder.attention.head_count": sizes.n_decoder_head,
        "decoder.feed_forward_length": _shape(path, tensors, f"{DEC}blk.0.ffn_up.weight", 2)[0],
        "attention.layer_norm_epsilon": EPS,
    }
    made = {f"{ARCH}.{key}": value for key, value in keys.items()}
    name = path.resolve().name if path.is_dir() else path.stem
    return {
        "general.architecture": ARCH,
        "general.type": "model",
        "general.name": name,
        **made,
    }


def _shape(path: Path, tensors: Mapping[str, Tensor], name: str, n_dims: int) -> tuple[int, ...]:
    tensor = tensors.get(name)
    if tensor is None:
        raise FileError("the tensor is missing", path=path, where=name, expected="a Whisper model")
    if len(tensor.shape) != n_dims:
        raise tensor.error(f"shape {list(tensor.shape)}", f"{n_dims} dimensions")
    return tensor.shape


def list_keys(
    suppress: Sequence[int], begin: Sequence[int], heads: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the keys of tokens that are never generated (``suppress``: anywhere; ``begin``: at the
    beginning), and of alignment heads, (layer, head) pairs. Empty lists are left out.
    """
    flat = [number for pair in heads for number in pair]
    found = {SUPPRESS: suppress, BEGIN_SUPPRESS: begin, ALIGNMENT_HEADS: flat}
    return {key: number_array(ValueType.INT32, ids) for key, ids in found.items() if len(ids)}


def vocabulary_keys(texts: Sequence[str], n_vocab: int) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` metadata of a GGUF file, except the merges.

    ``texts``: tokens by id, in GPT-2's letters for bytes. If there are fewer than ``n_vocab``, they
    are the text tokens, and special tokens are added as in Whisper's vocabularies.
    """
    tokens = list(texts)
    if len(tokens) < n_vocab:
        specials = special_names(n_vocab)
        if not specials:  # none of Whisper's vocabularies: only the first two are certain
            specials = ["<|endoftext|>", "<|startoftranscript|>"][: n_vocab - len(tokens)]
            specials += [f"<|unused{i}|>" for i in range(n_vocab - len(tokens) - 2)]
        n_text = n_vocab - len(specials)
        tokens += [""] * (n_text - len(tokens))  # the last of them may have no bytes
        tokens = [*tokens[:n_text], *specials]
    eot = next((i for i, text in enumerate(tokens) if text == "<|endoftext|>"), n_vocab - 1)
    types = np.full(len(tokens), TokenType.NORMAL, np.int32)
    types[eot:] = TokenType.CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        TOKENS: string_array([text.encode() for text in tokens]),
        TYPES: number_array(ValueType.INT32, types.tolist()),
        "tokenizer.ggml.bos_token_id": eot,
        "tokenizer.ggml.eos_token_id": eot,
        "tokenizer.ggml.unknown_token_id": eot,
        "tokenizer.ggml.add_bos_token": False,
    }


def read_keys(folder: Path, config: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Return the tokenizer's keys of a folder's tokenizer files, {} without any.

    No tokens go around a text, because prompts state task and language. All special tokens are
    control tokens; timestamps too, which also get their names.
    """
    found = read_tokenizer(folder, config, n_vocab)
    if not isinstance(found.get(TOKENS), GGUFArray):
        return {}
    keys = {key: value for key, value in found.items() if key != BEFORE}
    raws = _with_timestamps(keys[TOKENS].raws())
    eot = raws.index(END) if END in raws else n_vocab
    types = keys[TYPES].numpy().copy()
    types[eot:] = TokenType.CONTROL
    return {
        **keys,
        **{f"tokenizer.ggml.add_{name}_token": False for name in ("bos", "eos")},
        TOKENS: string_array(raws),
        TYPES: number_array(ValueType.INT32, types.tolist()),
    }


def _with_timestamps(tokens: list[bytes]) -> list[bytes]:
    """Return the tokens with those after ``<|notimestamps|>`` named by their times, because old
    folders have no names for them.
    """
    if b"<|notimestamps|>" not in tokens:
        return tokens
    first = tokens.index(b"<|notimestamps|>") + 1
    named = (timestamp_name(i).encode() for i in range(len(tokens) - first))
    return [*tokens[:first], *named]


def non_speech(tokens: Sequence[bytes], n_text: int) -> list[int]:
    """Return the ids that OpenAI's program never generates by default: symbols of notation, music
    and noise. Files of Hugging Face list the same ids.

    ``tokens``: the text tokens' bytes by id; ``n_text``: their number, which is the id of
    ``<|endoftext|>``.
    """
    ids = {raw: i for i, raw in enumerate(tokens)}
    found = {ids.get(text.encode(), -1) for text in _INSIDE_WORDS}
    for symbol in _SYMBOLS:
        for text in (symbol, f" {symbol}"):
            found.add(ids.get(text.encode(), -1))
    for note in _NOTES:
        for text in (note, f" {note}"):
            raw = text.encode()
            found.add(next((ids[raw[:n]] for n in range(len(raw), 0, -1) if raw[:n] in ids), -1))
    return sorted(i for i in found if 0 <= i < n_text)
