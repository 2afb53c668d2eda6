"""Converts tokenizer.json of encoders to GGUF's vocabularies: WordPiece (``bert``) and Unigram
(``t5``).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.convert.hf.tokenizer.special_tokens import added_tokens
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import ValueType, number_array
from treadle.tokenizer.normalizer import (
    CHARSMAP,
    FORMS,
    PREPENDS,
    REPLACES,
    STRIPS,
    WHOLE,
    WORDS,
    is_sound,
    usual_steps,
)
from treadle.tokenizer.vocab import SPACES, TokenType

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
_BERT = tuple(
    f"{name}Tokenizer{fast}" for name in ("Bert", "DistilBert", "Electra") for fast in ("", "Fast")
)
_WORDS = {
    "model.max_input_chars_per_word": 100,
    "pre_tokenizer.type": "BertPreTokenizer",
    "normalizer.clean_text": True,
    "normalizer.handle_chinese_chars": True,
}

Texts = list[bytes | None]
Found = tuple[Texts, list[int], list[float] | None, dict[str, Any]]


def as_bert(spec: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json (``spec``) as transformers' BERT class reads it: with the normalizer's
    settings replaced by those of tokenizer_config.json (``settings``), or by the class's defaults.
    Other tokenizers' are returned unchanged.
    """
    node = spec.get("normalizer")
    ours = settings.get("tokenizer_class") in _BERT or "do_lower_case" in settings
    if not ours or not isinstance(node, dict) or node.get("type") != "BertNormalizer":
        return spec
    said = {
        "lowercase": settings.get("do_lower_case", True),
        "strip_accents": settings.get("strip_accents"),
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
    }
    return {**spec, "normalizer": {**node, **said}}


def read_wordpiece(spec: dict[str, Any], path: Path, n_vocab: int) -> Found:
    """Return pieces and types by id, None for scores, and further keys of tokenizer.json
    (``spec``). A GGUF piece that begins a word has a mark in front; in WordPiece all others have
    one (``##``). Raises FileError for invalid ids, UnsupportedError for rules that GGUF's BERT
    lacks.
    """
    model = spec["model"]
    if model.get("continuing_subword_prefix", "##") != "##":
        raise UnsupportedError(
            f"{path}: model.continuing_subword_prefix: treadle supports only '##'"
        )
    vocab = model.get("vocab")
    special = {token.text for token in added_tokens(spec, path).values()}
    if not isinstance(vocab, dict) or not vocab:
        raise FileError("is missing", path=path, where="model.vocab", expected="pieces and ids")
    texts: Texts = [None] * n_vocab
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i < n_vocab or texts[i] is not None:
            what = f"maps {text!r:.60} to id {i!r:.40}"
            expected = f"a unique id below {n_vocab}"
            raise FileError(what, path=path, where="model.vocab", expected=expected)
        inner = text.removeprefix("##") if text.startswith("##") else _SPACE + text
        texts[i] = (text if text in special else inner).encode("utf-8", "surrogatepass")
    types = [int(TokenType.UNUSED if text is None else TokenType.NORMAL) for text in texts]
    node = _normalizer(spec)
    if not isinstance(node, dict) or node.get("type") != "BertNormalizer":
        raise UnsupportedError(
            f"{path}: normalizer {node!r:.120}: treadle supports only BertNormalizer here"
        )
    _refuse_other_words(spec, node, path)
    lowercase = node.get("lowercase", True) is True
    strip = node.get("strip_accents")
    keys = {
        "pre": "default",
        "normalizer.lowercase": lowercase,
        "normalizer.strip_accents": lowercase if strip is None else strip is True,
    }
    return texts, types, None, keys


def _normalizer(spec: dict[str, Any]) -> Any:
    """Return the normalizer of tokenizer.json (``spec``), as JSON. sentence-transformers writes
    ``do_lower_case`` as a Lowercase before BERT's normalizer: it is merged into that, and does not
    strip accents.
    """
    node = spec.get("normalizer")
    several = node.get("normalizers") if isinstance(node, dict) else None
    if not isinstance(several, list) or not all(isinstance(each, dict) for each in several):
        return node
    if [each.get("type") for each in several] != ["Lowercase", "BertNormalizer"]:
        return node
    own = several[1]
    strip = own.get("strip_accents")
    strip = own.get("lowercase", True) if strip is None else strip
    return {**own, "lowercase": True, "strip_accents": strip}


def _refuse_other_words(spec: dict[str, Any], normalizer: dict[str, Any], path: Path) -> None:
    """Raise UnsupportedError if tokenizer.json (``spec``, and its ``normalizer``) splits words in
    another way than BERT: GGUF has keys for BERT's only.
    """
    before = spec.get("pre_tokenizer")
    found = {
        "model.max_input_chars_per_word": spec["model"].get("max_input_chars_per_word", 100),
        "pre_tokenizer.type": before.get("type") if isinstance(before, dict) else before,
        "normalizer.clean_text": normalizer.get("clean_text", True),
        "normalizer.handle_chinese_chars": normalizer.get("handle_chinese_chars", True),
    }
    for key, value in found.items():
        if value != _WORDS[key]:
            raise UnsupportedError(
                f"{path}: {key} is {value!r:.60}: treadle supports only {_WORDS[key]!r}"
            )


def read_unigram(spec: dict[str, Any], path: Path, n_vocab: int) -> Found:
    """Return pieces, types and scores by id, and further keys, of tokenizer.json (``spec``). Raises
    FileError for damaged contents, UnsupportedError for rules that sentencepiece lacks.
    """
    model = spec["model"]
    vocab = model.get("vocab")
    unk = model.get("unk_id")
    sound = isinstance(vocab, list) and 0 < len(vocab) <= n_vocab
    if not sound or not all(_is_scored(entry) for entry in vocab):
        what = f"is {vocab!r:.60}"
        expected = f"at most {n_vocab} pieces with scores"
        raise FileError(what, path=path, where="model.vocab", expected=expected)
    if type(unk) is not int or not 0 <= unk < len(vocab):
        raise FileError(f"is {unk!r:.60}", path=path, where="model.unk_id", expected="an id")
    types = [int(TokenType.BYTE if _BYTE.fullmatch(t) else TokenType.NORMAL) for t, _ in vocab]
    types[unk] = int(TokenType.UNKNOWN)
    texts: Texts = [text.encode("utf-8", "surrogatepass") for text, _ in vocab]
    keys = {"pre": "default", "unknown_token_id": unk, **_rules(spec, path)}
    return texts, types, [float(score) for _, score in vocab], keys


def _is_scored(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    return type(entry[1]) in (int, float) and entry[1] - entry[1] == 0.0


def _rules(spec: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the keys of text normalization and of the space before a text, from tokenizer.json
    (``spec``). Raises UnsupportedError for rules that sentencepiece cannot express.
    """
    steps: list[str] = []
    keys: dict[str, Any] = {}
    for key, parts in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        node = spec.get(key)
        inner = node.get(parts) if isinstance(node, dict) else None
        for step in inner if isinstance(inner, list) else [node] if node is not None else []:
            found = _words(step)
            if found is None:
                raise UnsupportedError(f"{path}: {step!r:.120}: unsupported rule")
            if found == [CHARSMAP]:
                keys["precompiled_charsmap"] = _charsmap(step, path)
            steps += found
    if not is_sound(steps):
        what = "treadle supports only Metaspace, alone or after WhitespaceSplit"
        raise UnsupportedError(f"{path}: pre_tokenizer: {spec.get('pre_tokenizer')!r:.160}: {what}")
    removes = not {WORDS, *STRIPS, *REPLACES}.isdisjoint(steps)
    keys |= {"add_space_prefix": steps[-1] != "never", "remove_extra_whitespaces": removes}
    if steps != usual_steps(CHARSMAP in steps, removes, steps[-1] != "never"):
        keys[SPACES] = " ".join(steps)
    return keys


def _words(step: Any) -> list[str] | None:
    """Return the words of ``treadle/tokenizer/normalizer.py`` for a step of tokenizer.json (its
    JSON object); None for an unsupported step.
    """
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Precompiled":
        return [CHARSMAP]
    if kind in FORMS.values():
        return [word for word, name in FORMS.items() if name == kind]
    if kind == "WhitespaceSplit":
        return [WORDS]
    if kind == "Strip":
        sides = step.get("strip_left") is True, step.get("strip_right") is True
        return [word for word, both in STRIPS.items() if both == sides]
    if kind == "Replace" and isinstance(step.get("pattern"), dict):
        how = step["pattern"].get("Regex"), step.get("content")
        return next(([word] for word, both in REPLACES.items() if both == how), None)
    if kind == "Metaspace" and step.get("replacement") == _SPACE:
        prepend = step.get("prepend_scheme", "always")
        return [*[WHOLE] * (step.get("split") is False), prepend] if prepend in PREPENDS else None
    return None


def _charsmap(step: dict[str, Any], path: Path) -> Any:
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as e:
        raise FileError(f"is not base64: {e}", path=path, where="precompiled_charsmap") from None
    return number_array(ValueType.UINT8, list(data))
