"""Converts tokenizer files of a Hugging Face model to GGUF's ``tokenizer.*`` keys.

tokenizer.json describes byte-level BPE (Llama 3, Qwen) in full. For SentencePiece vocabularies
(Llama 2, Mistral, Gemma) the original is tokenizer.model; without it, the order of merges in
tokenizer.json gives the scores. tokenizer_config.json and other files name the special tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from treadle.base.caller_warnings import warn
from treadle.base.fast_classes import dataclass
from treadle.convert.hf.families.rwkv7 import RWKV, WORLD, read_world
from treadle.convert.hf.tokenizer.chat_template import read_templates
from treadle.convert.hf.tokenizer.chatglm import CHATGLM, read_chatglm
from treadle.convert.hf.tokenizer.encoder import as_bert, read_unigram, read_wordpiece
from treadle.convert.hf.tokenizer.kimi import KIMI, RANKS, read_kimi
from treadle.convert.hf.tokenizer.pretokenizer import find_pre, puts_space
from treadle.convert.hf.tokenizer.sentence_settings import lower_case, sentences_file
from treadle.convert.hf.tokenizer.sentencepiece_model import UNIGRAM, read_sentencepiece
from treadle.convert.hf.tokenizer.special_tokens import (
    CheckpointSpecials,
    added_tokens,
    read_optional,
    read_specials,
)
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import ValueType, number_array, string_array
from treadle.files.safetensors import read_json
from treadle.tokenizer.normalizer import CHARSMAP, PREPENDS, WORDS
from treadle.tokenizer.vocab import END_OF_GENERATION, SPACES, TokenType

JSON = "tokenizer.json"
SPM = "tokenizer.model"
SPIECE = "spiece.model"  # T5's
CONFIG = "tokenizer_config.json"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NO_SCORE = -1000.0  # score of pieces that no merge makes; llama.cpp's
_SPACE = "\u2581"
_N_SPANS = 100  # transformers' default of extra_ids


@dataclass
class Pieces:
    """A vocabulary by id. ``types`` are GGUF's token types; a text is None for an id that no piece
    has yet.
    """

    path: Path
    model: str  # tokenizer.ggml.model
    texts: list[bytes | None]
    types: list[int]
    scores: list[float] | None = None
    keys: dict[str, Any] = field(default_factory=dict)  # tokenizer.ggml.* of this kind, SPACES
    ids: dict[str, int] = field(default_factory=dict)  # the vocabulary's own bos, eos ..
    adds: tuple[bool, bool] = (False, False)  # default: BOS before a text, EOS after it


def read_tokenizer(folder: Path, config: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Return all ``tokenizer.*`` keys for a model with ``n_vocab`` rows of embeddings; {} for a
    folder without tokenizer files.

    ``config`` is config.json. Rows beyond the vocabulary get names that no text matches. Raises
    FileError and UnsupportedError, naming file and key.
    """
    spec = read_json(folder / JSON) if os.path.lexists(folder / JSON) else None
    settings = read_optional(folder / CONFIG)
    if os.path.lexists(folder / WORLD) and config.get("model_type") in RWKV:
        return {**read_world(folder / WORLD, n_vocab), **read_templates(folder, settings)}
    if spec is not None and _is_byte_level(spec):
        pieces = _byte_level(spec, folder / JSON, n_vocab)
    elif spec is not None and (kind := _ENCODERS.get(_model_type(spec))):
        model, read = kind
        texts, types, scores, keys = read(as_bert(spec, settings), folder / JSON, n_vocab)
        pieces = Pieces(folder / JSON, model, texts, types, scores, keys)
    elif spec is not None and config.get("model_type") in _MERGED:
        pieces = _with_merges(spec, folder / JSON, n_vocab)
    elif os.path.lexists(folder / SPM) and config.get("model_type") in CHATGLM:
        pieces = Pieces(folder / SPM, **read_chatglm(folder / SPM))
    elif os.path.lexists(folder / RANKS) and config.get("model_type") in KIMI:
        pieces = Pieces(folder / RANKS, **read_kimi(folder / RANKS, n_vocab))
    elif os.path.lexists(folder / SPM):
        pieces = _apply_legacy(_from_model(folder / SPM), settings)
    elif spec is None and os.path.lexists(folder / SPIECE):
        pieces = _from_unigram_model(folder / SPIECE, settings, n_vocab)
    elif spec is not None:
        pieces = _apply_legacy(_from_merges(spec, folder / JSON, n_vocab), settings)
    else:
        return {}
    if len(pieces.texts) > n_vocab:
        raise FileError(
            f"has {len(pieces.texts)} tokens",
            path=pieces.path,
            expected=f"at most {n_vocab}, the rows of the embeddings",
        )
    special = read_specials(folder, spec, settings, config)
    _add(pieces, special, n_vocab)
    _warn_of_lost(folder, special, n_vocab)
    if isinstance(settings.get("add_prefix_space"), bool):
        _set_prefix(pieces.keys, settings["add_prefix_space"])
    if lower_case(folder):
        _lower(pieces, folder)
    made = {"model": pieces.model, **_arrays(pieces), **pieces.keys}
    made |= special.keys(_ids(pieces), pieces.ids, pieces.adds)
    found: dict[str, Any] = {
        key if key == SPACES else f"tokenizer.ggml.{key}": value for key, value in made.items()
    }
    for key, ids in special.lists(_ids(pieces), n_vocab).items():
        found[key] = number_array(ValueType.INT32, ids)
    return {**found, **read_templates(folder, settings)}


# transformers' classes whose space before a text depends on ``legacy``, not on the files.
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
_MERGED = ("gemma4", "gemma4_text")  # GGUF keeps the merges, without scores
# tokenizer.json's kinds other than BPE: GGUF's name, and the reader.
_ENCODERS = {"WordPiece": ("bert", read_wordpiece), "Unigram": ("t5", read_unigram)}


def _model_type(spec: dict[str, Any]) -> str:
    model = spec.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return kind if isinstance(kind, str) else ""


def _warn_of_lost(folder: Path, special: CheckpointSpecials, n_vocab: int) -> None:
    """Warn of begin and end tokens whose id is beyond the embeddings. Other such tokens may be
    those for images, which text models leave out.
    """
    texts = {i: token.text for i, token in special.added.items() if i >= n_vocab}
    named = {text for text in special.named.values() if text}
    numbered = {i for ids in special.numbered.values() for i in ids}
    lost = [
        i
        for i, text in sorted(texts.items())
        if i in numbered or text in named or text.encode() in END_OF_GENERATION
    ]
    if lost:
        shown = ", ".join(f"{texts[i]!r:.40} ({i})" for i in lost[:4])
        warn(
            f"{folder}: the tokenizer has {1 + max(texts)} tokens and the model {n_vocab} "
            f"(vocab_size): the model cannot generate {shown}, so output that should "
            "stop there runs on"
        )


def _add(pieces: Pieces, special: CheckpointSpecials, n_vocab: int) -> None:
    """Insert the added tokens of ``special`` into ``pieces``, and names for ids without a piece."""
    missing = n_vocab - len(pieces.texts)
    pieces.texts += [None] * missing
    pieces.types += [TokenType.UNUSED] * missing
    if pieces.scores is not None:
        pieces.scores += [_NO_SCORE] * missing
    for i, (text, is_special, *_) in special.added.items():
        if i >= n_vocab:  # the model has no row for it (Gemma's image token, in models of text)
            continue
        kind = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
        raw = text.encode("utf-8", "surrogatepass")
        if pieces.texts[i] != raw or pieces.types[i] not in (TokenType.UNKNOWN, TokenType.BYTE):
            pieces.types[i] = kind
        pieces.texts[i] = raw
    for i, piece in enumerate(pieces.texts):
        if piece is None:
            pieces.texts[i] = b"[PAD%d]" % i
            pieces.types[i] = TokenType.UNUSED


def _apply_legacy(pieces: Pieces, settings: Mapping[str, Any]) -> Pieces:
    """Set where spaces are put in a text, and return ``pieces``: with transformers' Llama
    tokenizers ``legacy`` of tokenizer_config.json (``settings``) decides that for sentencepiece
    BPE. Other classes are left as they are.
    """
    if settings.get("tokenizer_class") in _LLAMA and pieces.keys["add_space_prefix"]:
        pieces.keys[SPACES] = "always" if settings.get("legacy") is True else "first"
    return pieces


def _set_prefix(keys: dict[str, Any], adds: bool) -> None:
    """Set in GGUF's ``keys`` whether a space goes before a text (``adds``), overriding what the
    vocabulary's file says.
    """
    if "add_space_prefix" in keys:
        keys["add_space_prefix"] = adds
    before, _, prepend = keys.get(SPACES, "").rpartition(" ")
    if prepend and (prepend != "never") != adds:
        keys[SPACES] = f"{before} {'always' if adds else 'never'}".strip()


def _lower(pieces: Pieces, folder: Path) -> None:
    """Set lower-casing, which sentence-transformers does before it tokenizes. Raises
    UnsupportedError unless the vocabulary is WordPiece, for which alone GGUF has a key.
    """
    key = "normalizer.lowercase"
    if key not in pieces.keys:
        what = "do_lower_case is true: treadle supports it only with WordPiece vocabularies"
        raise UnsupportedError(f"{sentences_file(folder)}: {what}")
    pieces.keys[key] = True


def _ids(pieces: Pieces) -> dict[str, int]:
    """Return token ids by text; the lowest id of equal texts."""
    texts = [text.decode("utf-8", "replace") for text in pieces.texts if text is not None]
    return {text: i for i, text in reversed(list(enumerate(texts)))}


def _arrays(pieces: Pieces) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": string_array([text or b"" for text in pieces.texts]),
        "token_type": number_array(ValueType.INT32, pieces.types),
    }
    if pieces.scores is not None:
        found["scores"] = number_array(ValueType.FLOAT32, pieces.scores)
    return found


# -- SentencePiece --------------------------------------------------------------------------


def _from_model(path: Path) -> Pieces:
    model = read_sentencepiece(path)
    keys = {
        "pre": "default",
        "add_space_prefix": model.add_dummy_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
    }
    texts: list[bytes | None] = [*model.pieces]
    return Pieces(path, "llama", texts, model.types, model.scores, keys, model.ids, (True, False))


def _from_unigram_model(path: Path, settings: Mapping[str, Any], n_vocab: int) -> Pieces:
    """Convert T5's spiece.model as transformers reads it: words are split one by one, and tokens
    for masked spans (``<extra_id_N>``) follow the pieces in descending order.
    """
    model = read_sentencepiece(path, UNIGRAM)
    if "unk" not in model.ids:
        raise FileError("has no unknown piece", path=path, expected="a sentencepiece model")
    texts: list[bytes | None] = [*model.pieces]
    n_spans = settings.get("extra_ids")
    if not isinstance(n_spans, int) or isinstance(n_spans, bool):
        n_spans = _N_SPANS if len(texts) + _N_SPANS <= n_vocab else 0
    spans = [b"<extra_id_%d>" % i for i in reversed(range(n_spans))]
    keys: dict[str, Any] = {
        "pre": "default",
        "unknown_token_id": model.ids["unk"],
        "add_space_prefix": model.add_dummy_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
        SPACES: " ".join([*[CHARSMAP] * bool(model.charsmap), WORDS, "always"]),
    }
    if model.charsmap:
        keys["precompiled_charsmap"] = number_array(ValueType.UINT8, list(model.charsmap))
    return Pieces(
        path,
        "t5",
        [*texts, *spans],
        [*model.types, *[int(TokenType.CONTROL)] * n_spans],
        [*model.scores, *[0.0] * n_spans],
        keys,
        model.ids,
        (False, True),
    )


def _from_merges(spec: dict[str, Any], path: Path, n_vocab: int) -> Pieces:
    """Convert sentencepiece BPE from tokenizer.json (``spec``): a piece's score is the negative
    rank of its merge.

    sentencepiece merges any two pieces that make a piece. If the file lacks one of these merges, no
    scores can express that: raises UnsupportedError.
    """
    texts, merges = _vocabulary(spec, path, n_vocab)
    ids = {text: i for i, text in enumerate(texts) if text is not None}
    prepend = _space_rule(spec, path)
    added = {token.text for token in added_tokens(spec, path).values()}
    unknown = spec["model"].get("unk_token")
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    scores = []
    types = []
    pairs = set(merges)
    for text in texts:
        scores.append(-float(ranks[text]) if text in ranks else _NO_SCORE - len(ranks))
        kind = TokenType.BYTE if text and _BYTE.fullmatch(text) else TokenType.NORMAL
        types.append(int(TokenType.UNKNOWN if text == unknown else kind))
        if text is None or text in added or kind is not TokenType.NORMAL:
            continue
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair in pairs or pair[0] not in ids or pair[1] not in ids:
                continue
            if not added.isdisjoint(pair):
                continue
            raise UnsupportedError(
                f"{path}: model.merges: {text!r:.60} is a token, but no merge builds it from "
                f"{pair[0]!r:.60} and {pair[1]!r:.60}, as SentencePiece would: add the "
                "tokenizer.model that this vocabulary was made from"
            )
    keys: dict[str, Any] = {"pre": "default", "add_space_prefix": prepend != "never"}
    keys["remove_extra_whitespaces"] = False
    if prepend in ("always", "first"):  # Metaspace adds none before a space
        keys[SPACES] = prepend
    raws = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    return Pieces(path, "llama", raws, types, scores, keys)


def _with_merges(spec: dict[str, Any], path: Path, n_vocab: int) -> Pieces:
    """Convert a sentencepiece vocabulary of tokenizer.json (``spec``) whose merges GGUF takes
    unchanged, without scores (Gemma 4).
    """
    texts, merges = _vocabulary(spec, path, n_vocab)
    if _space_rule(spec, path) != "never":
        raise UnsupportedError(
            f"{path}: adds a space before text, which GGUF cannot express for this vocabulary"
        )
    types = [int(TokenType.BYTE if t and _BYTE.fullmatch(t) else TokenType.NORMAL) for t in texts]
    unknown = spec["model"].get("unk_token")
    if unknown in texts:
        types[texts.index(unknown)] = int(TokenType.UNKNOWN)
    lines = [" ".join(pair).encode("utf-8", "surrogatepass") for pair in merges]
    keys = {"pre": "gemma4", "add_space_prefix": False, "merges": string_array(lines)}
    raws = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    return Pieces(path, "gemma4", raws, types, None, keys, {}, (True, False))


def _space_rule(spec: dict[str, Any], path: Path) -> str:
    """Return when tokenizer.json (``spec``) puts a space before a text: "never", "prepend" (before
    any text), or Metaspace's prepend_scheme. Raises UnsupportedError for rules about anything but
    spaces.
    """
    steps: list[Any] = []
    for key, parts in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        node = spec.get(key)
        inner = node.get(parts) if isinstance(node, dict) else None
        steps += inner if isinstance(inner, list) else [node] if node is not None else []
    adds = "never"
    marks = False
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        pattern = step.get("pattern") if kind else None
        if kind == "Prepend" and step.get("prepend") == _SPACE:
            adds = "prepend"
        elif kind == "Replace" and (pattern, step.get("content")) == ({"String": " "}, _SPACE):
            marks = True
        elif (
            kind == "Metaspace"
            and step.get("split") is False
            and step.get("prepend_scheme", "always") in PREPENDS
        ):
            marks = step.get("replacement") == _SPACE
            adds = step.get("prepend_scheme", "always")
        elif kind == "Split" and pattern == {"String": " "} and marks:
            continue  # no spaces are left to split at
        else:
            raise UnsupportedError(f"{path}: {step!r:.120}: unsupported rule")
    if not marks:
        raise UnsupportedError(
            f"{path}: unsupported: neither a byte-level vocabulary nor {_SPACE} for spaces"
        )
    return adds


# -- byte-level BPE -------------------------------------------------------------------------


def _is_byte_level(spec: dict[str, Any]) -> bool:
    node = spec.get("pre_tokenizer")
    parts = node.get("pretokenizers") if isinstance(node, dict) else None
    nodes = [node, *(parts if isinstance(parts, list) else [])]
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in nodes)


def _byte_level(spec: dict[str, Any], path: Path, n_vocab: int) -> Pieces:
    texts, merges = _vocabulary(spec, path, n_vocab)
    normalizer = spec.get("normalizer")
    # NFC is Qwen's; GGUF has no key for it, and text is nearly always in NFC already.
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise UnsupportedError(f"{path}: normalizer {normalizer!r:.120}: GGUF cannot express it")
    spaced = next((pair for pair in merges if " " in pair[0] or " " in pair[1]), None)
    if spaced:
        raise FileError(f"has {spaced!r:.80}", path=path, where="model.merges", expected="letters")
    keys = {
        "pre": find_pre(spec, path),
        "merges": string_array(
            [" ".join(pair).encode("utf-8", "surrogatepass") for pair in merges]
        ),
    }
    if puts_space(spec.get("pre_tokenizer")):
        keys[SPACES] = "always"
    raws = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    types = [int(TokenType.UNUSED if text is None else TokenType.NORMAL) for text in texts]
    return Pieces(path, "gpt2", raws, types, None, keys)


# -- tokenizer.json's model -----------------------------------------------------------------


def _vocabulary(
    spec: dict[str, Any], path: Path, n_vocab: int
) -> tuple[list[str | None], list[tuple[str, str]]]:
    """Return the pieces of tokenizer.json (``spec``) by id (None for unused ids), and its merges as
    pairs. Raises FileError if an id or a side of a merge is invalid.
    """
    model = spec.get("model")
    if not isinstance(model, dict):
        raise FileError(f"is {model!r:.60}", path=path, where="model", expected="an object")
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(
            f"{path}: a {model.get('type')!r:.40} tokenizer: treadle supports only BPE here"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise UnsupportedError(f"{path}: model.{key} is {model[key]!r:.60}: not supported")
    vocab = model.get("vocab")
    merges = model.get("merges")
    if not isinstance(vocab, dict) or not vocab:
        raise FileError("is missing", path=path, where="model.vocab", expected="pieces and ids")
    texts: list[str | None] = [None] * n_vocab
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i < n_vocab or texts[i] is not None:
            what = f"maps {text!r:.60} to id {i!r:.40}"
            raise FileError(
                what, path=path, where="model.vocab", expected=f"a unique id below {n_vocab}"
            )
        texts[i] = text
    while texts and texts[-1] is None:
        texts.pop()
    if not isinstance(merges, list):
        raise FileError("is missing", path=path, where="model.merges", expected="a list")
    return texts, _pairs(merges, vocab, path)


def _pairs(merges: list[Any], vocab: dict[str, int], path: Path) -> list[tuple[str, str]]:
    """Return merges, "left right" or lists of two, as pairs of pieces. Raises FileError unless both
    halves and the result are pieces in ``vocab`` (ids by piece).

    All are checked at once, since there are hundreds of thousands; the loop only finds the first
    wrong one.
    """
    split = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if set(map(type, split)) <= {list} and set(map(len, split)) <= {2}:
        sides = [side for pair in split for side in pair]
        if set(map(type, sides)) <= {str}:
            pairs = list(zip(sides[::2], sides[1::2], strict=True))
            if vocab.keys() >= {*sides, *(left + right for left, right in pairs)}:
                return pairs
    wrong = next(m for m, pair in zip(merges, split, strict=True) if not _is_merge(pair, vocab))
    expected = "two tokens whose concatenation is a third"
    raise FileError(f"has {wrong!r:.80}", path=path, where="model.merges", expected=expected)


def _is_merge(pair: Any, vocab: dict[str, int]) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or set(map(type, pair)) != {str}:
        return False
    return {*pair, pair[0] + pair[1]} <= vocab.keys()
