"""What sentence-transformers does to a text before a model reads it, from the files of its folders.

sentence_bert_config.json has the longest text and lower case, config_sentence_transformers.json the
prompts by name, and which of them goes before a text where the caller names none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from treadle.convert.hf.config import HfConfig
from treadle.convert.hf.pooling import pooling_file
from treadle.convert.hf.tokenizer.special_tokens import read_optional
from treadle.errors import UnsupportedError
from treadle.files.keys import POSITION_MAX, MetadataReader
from treadle.files.splits import SENTENCES
from treadle.models.archs import ARCHS
from treadle.models.sentence import MAX_TOKENS, PROMPT

PROMPTS = "config_sentence_transformers.json"
MODULES = "modules.json"
_TOKENIZER = "tokenizer_config.json"
# Of transformers' config and tokenizer, older words and newer ones.
_ARGUMENTS = ("config_args", "config_kwargs", "tokenizer_args", "processor_kwargs")
_HARMLESS = (  # change no vector of a text that is read whole
    *("trust_remote_code", "attn_implementation", "use_fast", "use_cache"),
    *("padding", "padding_side", "truncation", "truncation_side"),
)


def read_sentences(folder: Path) -> dict[str, Any]:
    """treadle's keys of texts to embed. Raises FileError and UnsupportedError."""
    made: dict[str, Any] = {}
    _refuse_arguments(folder)
    if limit := _max_seq_length(folder):
        made[MAX_TOKENS] = limit
    if prompt := _default_prompt(folder):
        made[PROMPT] = prompt
    return made


def read_query(folder: Path, hyper: HfConfig) -> dict[str, Any]:
    """What goes before the query, where a cross-encoder's folder names it. Errors as above."""
    prompt = _default_prompt(folder)
    if prompt and ARCHS[hyper.family.arch].graph != "encoder":
        what = "treadle has a default prompt of rerankers that are encoders"
        raise UnsupportedError(f"{folder / PROMPTS}: default_prompt_name: {what}")
    return {PROMPT: prompt} if prompt else {}


def sentences_file(folder: Path) -> Path:
    """What sentence-transformers reads of a folder about texts; it need not be there."""
    found = [folder / name for name in SENTENCES if os.path.lexists(folder / name)]
    return found[0] if found else folder / SENTENCES[0]


def lower_case(folder: Path) -> bool:
    """Whether texts are made lower case before the tokenizer has them."""
    return read_optional(sentences_file(folder)).get("do_lower_case") is True


def _refuse_arguments(folder: Path) -> None:
    """What overrides config.json and the tokenizer's files."""
    path = sentences_file(folder)
    said = MetadataReader(read_optional(path), path)
    for given in filter(None, map(said.within, _ARGUMENTS)):
        for key, value in given.values.items():
            if value is not None and key not in _HARMLESS:
                given.refuse(key, f"is {value!r:.60}: treadle reads the model's files as they are")


def _max_seq_length(folder: Path) -> int:
    """Tokens; 0: no limit but the model's. Where no number is given, the tokenizer's counts."""
    path = sentences_file(folder)
    sentences = MetadataReader(read_optional(path), path)
    if sentences.get("max_seq_length") is not None:
        return sentences.integer("max_seq_length", hi=POSITION_MAX)
    if not os.path.lexists(folder / MODULES):  # no folder of sentence-transformers
        return 0
    tokenizer = MetadataReader(read_optional(folder / _TOKENIZER), folder / _TOKENIZER)
    most = tokenizer.number("model_max_length", 0.0, lo=0.0, hi=1e300)
    return int(most) if most < POSITION_MAX else 0  # transformers writes 1e30 for none


def _default_prompt(folder: Path) -> str:
    said = MetadataReader(read_optional(folder / PROMPTS), folder / PROMPTS)
    if said.get("default_prompt_name") is None:
        return ""
    name, prompts = said.text("default_prompt_name"), said.within("prompts")
    prompt = prompts.text(name, "") if prompts else ""
    if prompts is None or prompts.get(name) is None:
        names = ", ".join(prompts.values) if prompts else "no names"
        said.fail("default_prompt_name", f"is {name!r:.60}", f"a name of prompts: {names:.120}")
    pooling = pooling_file(folder)
    if prompt and read_optional(pooling).get("include_prompt") is False:
        raise UnsupportedError(
            f"{pooling}: include_prompt is false: treadle pools all tokens of a text, "
            f"those of the default prompt {prompt!r:.60} too"
        )
    return prompt
