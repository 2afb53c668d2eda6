"""The special tokens of a Hugging Face model, merged from five files.

Added tokens are in tokenizer.json, tokenizer_config.json and added_tokens.json (the first wins);
their roles in tokenizer_config.json, special_tokens_map.json, generation_config.json and
config.json; tokens around a text in tokenizer_config.json, or in tokenizer.json's template.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.tokenizer.chatglm import BEFORE as CHATGLM_BEFORE
from treadle.convert.hf.tokenizer.chatglm import CHATGLM
from treadle.errors import FileError, UnsupportedError
from treadle.files.safetensors import read_json
from treadle.tokenizer.vocab import BEFORE, END_OF_GENERATION, LSTRIP, RSTRIP

# transformers' names to GGUF's (seperator is GGUF's spelling)
_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
_MORE_ENDS = ("eot_token_id", "eom_token_id")  # GGUF's keys for further end tokens
_MAX_ID = 1 << 31
GENERATION = "generation_config.json"


class AddedToken(NamedTuple):
    """An added token. ``special``: it is a control token; ``lstrip``, ``rstrip``: it strips white
    space before it, after it.
    """

    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class CheckpointSpecials:
    """The special tokens of a checkpoint.

    added: added tokens by id. named: the texts of bos, eos ..; None if a file sets null.
    numbered: ids of bos, eos .., if a file gives ids.
    adds: whether BOS goes before a text, and EOS after it; None if unspecified.
    """

    path: Path
    added: dict[int, AddedToken]
    named: dict[str, str | None]
    numbered: dict[str, list[int]]
    adds: tuple[bool | None, bool | None]
    template: tuple[list[str], list[str]] | None  # tokens around a text by tokenizer.json
    n_separators: int = 0  # tokens between two texts by tokenizer.json
    before: tuple[str, ...] = ()  # several tokens before a text, in place of BOS

    def keys(
        self, ids: Mapping[str, int], own: Mapping[str, int], adds: tuple[bool, bool]
    ) -> dict[str, Any]:
        """Return GGUF's keys of special tokens, without the prefix ``tokenizer.ggml.``.

        ids: token ids by text.
        own, adds: special token ids by role ("bos", "eos" ..), and whether BOS goes before a text
            and EOS after it, as the vocabulary's own file states; used if no other file overrides
            them.
        """
        found: dict[str, int] = {}
        texts = {i: text for text, i in ids.items()}
        for name in _KEYS:
            text = self.named.get(name)
            numbers = [i for i in self.numbered.get(name, []) if i in texts]
            if text is not None and text in ids:
                found[name] = ids[text]
            elif numbers and (name == "eos" or name not in self.named):
                found[name] = numbers[0]
            elif name in own and name not in self.named:
                found[name] = own[name]
        told = [found["eos"]] if "eos" in found else []
        before, after = self._adds_bos_eos(ids, found, adds)
        keys: dict[str, Any] = {_KEYS[name]: i for name, i in found.items()}
        ends = [
            i
            for i in dict.fromkeys([*self.numbered.get("eos", []), *told])
            if i != found.get("eos") and texts.get(i, "").encode() not in END_OF_GENERATION
        ]
        keys |= dict(zip(_MORE_ENDS, (i for i in ends if i in texts), strict=False))
        keys |= {"add_bos_token": before, "add_eos_token": after}
        if after and self.n_separators and {"bos", "eos"} <= found.keys():
            # llama.cpp puts EOS and SEP between two texts, each if its flag is set.
            keys |= {"add_eos_token": self.n_separators > 1, "add_sep_token": True}
            keys.setdefault(_KEYS["sep"], found["eos"])
        return keys

    def lists(self, ids: Mapping[str, int], n_vocab: int) -> dict[str, list[int]]:
        """Return treadle's own keys: ids of tokens that strip white space next to them, and of
        several tokens before a text; empty lists are left out. ``ids``: token ids by text.
        """
        own = {i: token for i, token in self.added.items() if i < n_vocab}
        left = sorted(i for i, token in own.items() if token.lstrip)
        right = sorted(i for i, token in own.items() if token.rstrip)
        before = [ids[text] for text in self.before if text in ids]
        lists = (LSTRIP, left), (RSTRIP, right), (BEFORE, before)
        return {key: listed for key, listed in lists if listed}

    def _adds_bos_eos(
        self, ids: Mapping[str, int], found: dict[str, int], adds: tuple[bool, bool]
    ) -> tuple[bool, bool]:
        """Return whether BOS goes before a text, and EOS after it. ``ids``, ``adds``: as in
        ``keys``; ``found``: special token ids by role, to which the template's own tokens are
        added. Raises UnsupportedError for other tokens around a text.
        """
        sides = list(adds)
        if self.template is not None:
            for side, name in enumerate(("bos", "eos")):
                tokens = self.template[side]
                if name == "bos" and self.before and set(self.before) <= ids.keys():
                    sides[side] = False
                    continue
                # Qwen3's embedders have another token after a text than the EOS of answers.
                own = name not in found or (name == "eos" and len(tokens) == 1)
                if tokens and own and tokens[0] in ids:
                    found[name] = ids[tokens[0]]
                wanted = [found[name]] if tokens and name in found else []
                if [ids.get(token) for token in tokens] != wanted:
                    raise UnsupportedError(
                        f"{self.path}: post_processor puts {tokens!r:.120} around text: GGUF can "
                        "express only BOS before it and EOS after it"
                    )
                sides[side] = bool(tokens)
        before, after = (
            own if said is None else said for said, own in zip(self.adds, sides, strict=True)
        )
        return before and "bos" in found, after and "eos" in found


def read_specials(
    folder: Path, spec: dict[str, Any] | None, settings: dict[str, Any], config: Mapping[str, Any]
) -> CheckpointSpecials:
    """Read the special tokens. ``spec`` is tokenizer.json, ``settings`` tokenizer_config.json,
    ``config`` config.json.

    Raises FileError for values that transformers would not write.
    """
    generation = read_optional(folder / GENERATION)
    named: dict[str, str | None] = {}
    maps = folder / "special_tokens_map.json"
    for path, values in (
        (maps, read_optional(maps)),
        (folder / "tokenizer_config.json", settings),
    ):
        for name in _KEYS:
            if f"{name}_token" in values:
                named[name] = _text(values[f"{name}_token"], path, f"{name}_token")
    numbered = {}
    for name in _KEYS:
        key = f"{name}_token_id"
        first = generation.get(key) is not None
        where = folder / (GENERATION if first else "config.json")
        numbered[name] = _numbers(generation[key] if first else config.get(key), where, key)
    said = settings.get("add_bos_token"), settings.get("add_eos_token")
    before, after = (value if isinstance(value, bool) else None for value in said)
    around = None if spec is None else _template(spec.get("post_processor"), folder)
    between = 0 if spec is None else _n_separators(spec.get("post_processor"))
    added = _added(folder, spec, settings, {text for text in named.values() if text})
    several = tuple(around[0]) if around and len(around[0]) > 1 else ()
    if around is None and config.get("model_type") in CHATGLM:
        texts = {token.text for token in added.values()}
        several = next((pair for pair in CHATGLM_BEFORE if set(pair) <= texts), CHATGLM_BEFORE[-1])
    return CheckpointSpecials(
        folder / "tokenizer.json", added, named, numbered, (before, after), around, between, several
    )


def read_optional(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} if the file does not exist. Raises FileError if it is
    damaged.
    """
    return read_json(path) if os.path.lexists(path) else {}


def _fail(path: Path, where: str, value: Any, expected: str) -> NoReturn:
    raise FileError(f"is {value!r:.80}", path=path, where=where, expected=expected)


def _text(value: Any, path: Path, key: str) -> str | None:
    """Return a token's text, from a string or an object with ``content``; None for null."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        _fail(path, key, value, "a token's text")
    return text


def _numbers(value: Any, path: Path, key: str) -> list[int]:
    """Return the ids in ``value``: null or -1 gives none, else one id or a list of them."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and -1 <= i < _MAX_ID for i in ids):
        _fail(path, key, value, "token ids")
    return [i for i in ids if i >= 0]


def added_tokens(spec: dict[str, Any], path: Path) -> dict[int, AddedToken]:
    """Return the added tokens of tokenizer.json (``spec``) by id."""
    entries = spec.get("added_tokens") or []
    if not isinstance(entries, list):
        _fail(path, "added_tokens", entries, "a list")
    return dict(_entry(entry, path, entry) for entry in entries)


def _entry(entry: Any, path: Path, number: Any) -> tuple[int, AddedToken]:
    if isinstance(number, dict):
        number = number.get("id")
    if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 10:
        number = int(number)
    text = entry.get("content") if isinstance(entry, dict) else None
    if (
        type(number) is not int
        or not 0 <= number < _MAX_ID
        or not isinstance(text, str)
        or not text
    ):
        _fail(path, "added_tokens", entry, "an id and a text")
    return number, AddedToken(
        text, *(entry.get(key) is True for key in ("special", "lstrip", "rstrip"))
    )


def _added(
    folder: Path, spec: dict[str, Any] | None, settings: dict[str, Any], special: set[str]
) -> dict[int, AddedToken]:
    found: dict[int, AddedToken] = {}
    path = folder / "added_tokens.json"
    for text, i in read_optional(path).items():
        found |= [_entry({"content": text, "special": text in special}, path, i)]
    path = folder / "tokenizer_config.json"
    entries = settings.get("added_tokens_decoder")
    if entries is not None and not isinstance(entries, dict):
        _fail(path, "added_tokens_decoder", entries, "an object")
    found |= [_entry(entry, path, i) for i, entry in (entries or {}).items()]
    if spec is not None:
        found |= added_tokens(spec, folder / "tokenizer.json")
    return found


def _template(node: Any, folder: Path) -> tuple[list[str], list[str]] | None:
    """Return the tokens that a post-processor (``node`` of tokenizer.json) puts before and after a
    single text; None without a template. Raises UnsupportedError for an unknown post-processor.
    """
    if not isinstance(node, dict):
        return None
    if isinstance(node.get("processors"), list):
        inner = [_template(part, folder) for part in node["processors"]]
        return next((found for found in inner if found is not None), None)
    if node.get("type") == "ByteLevel":
        return None
    single = node.get("single")
    path = folder / "tokenizer.json"
    if node.get("type") in ("BertProcessing", "RobertaProcessing"):
        around = [_first(node.get(key)) for key in ("cls", "sep")]
        if None in around:
            _fail(path, "post_processor", node, "cls and sep")
        return [str(around[0])], [str(around[1])]
    if node.get("type") != "TemplateProcessing" or not isinstance(single, list):
        raise UnsupportedError(f"{path}: post_processor {node.get('type')!r:.60}")
    sides: tuple[list[str], list[str]] = ([], [])
    side = 0
    for item in single:
        token = item.get("SpecialToken") if isinstance(item, dict) else None
        if isinstance(token, dict) and isinstance(token.get("id"), str):
            sides[side].append(token["id"])
        elif isinstance(item, dict) and "Sequence" in item:
            side = 1
        else:
            _fail(path, "post_processor.single", item, "SpecialToken or Sequence")
    return sides


def _first(pair: Any) -> str | None:
    """Return the text of ``pair``, [text, id] in JSON; None if it is no such pair."""
    return pair[0] if isinstance(pair, list) and pair and isinstance(pair[0], str) else None


def _n_separators(node: Any) -> int:
    """Return how many tokens a post-processor (``node`` of tokenizer.json) puts between the two
    texts of a pair; 0 if not given.
    """
    if not isinstance(node, dict):
        return 0
    if isinstance(node.get("processors"), list):
        return max(map(_n_separators, node["processors"]), default=0)
    if (n := {"BertProcessing": 1, "RobertaProcessing": 2}.get(str(node.get("type")))) is not None:
        return n
    pair = node.get("pair")
    items = [item for item in pair if isinstance(item, dict)] if isinstance(pair, list) else []
    places = [i for i, item in enumerate(items) if "Sequence" in item]
    return places[1] - places[0] - 1 if len(places) == 2 else 0
