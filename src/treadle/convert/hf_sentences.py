"""What sentence-transformers does to a text before a model reads it, from the files of its folders.

sentence_bert_config.json has the longest text and lower case, config_sentence_transformers.json the
prompts by name, and which of them goes before a text where the caller names none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from treadle.convert.hf_special import read_optional
from treadle.errors import UnsupportedError
from treadle.files.keys import POSITION_MAX, Keys
from treadle.models.sentence import MAX_TOKENS, PROMPT

SENTENCES = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
MODULES = "modules.json"
_TOKENIZER = "tokenizer_config.json"
_POOLING = "1_Pooling/config.json"


def read_sentences(folder: Path) -> dict[str, Any]:
    """treadle's keys of texts to embed. Raises FileError and UnsupportedError."""
    made: dict[str, Any] = {}
    if limit := _max_seq_length(folder):
        made[MAX_TOKENS] = limit
    if prompt := _default_prompt(folder):
        made[PROMPT] = prompt
    return made


def lower_case(folder: Path) -> bool:
    """Whether texts are made lower case before the tokenizer has them."""
    return read_optional(folder / SENTENCES).get("do_lower_case") is True


def _max_seq_length(folder: Path) -> int:
    """Tokens; 0: no limit but the model's. Where no number is given, the tokenizer's counts."""
    sentences = Keys(read_optional(folder / SENTENCES), folder / SENTENCES)
    if sentences.get("max_seq_length") is not None:
        return sentences.integer("max_seq_length", hi=POSITION_MAX)
    if not os.path.lexists(folder / MODULES):  # no folder of sentence-transformers
        return 0
    tokenizer = Keys(read_optional(folder / _TOKENIZER), folder / _TOKENIZER)
    most = tokenizer.number("model_max_length", 0.0, lo=0.0, hi=1e300)
    return int(most) if most < POSITION_MAX else 0  # transformers writes 1e30 for none


def _default_prompt(folder: Path) -> str:
    said = Keys(read_optional(folder / PROMPTS), folder / PROMPTS)
    if said.get("default_prompt_name") is None:
        return ""
    name, prompts = said.text("default_prompt_name"), said.within("prompts")
    prompt = prompts.text(name, "") if prompts else ""
    if prompts is None or prompts.get(name) is None:
        names = ", ".join(prompts.values) if prompts else "no names"
        said.fail("default_prompt_name", f"is {name!r:.60}", f"a name of prompts: {names:.120}")
    if prompt and read_optional(folder / _POOLING).get("include_prompt") is False:
        raise UnsupportedError(
            f"{folder / _POOLING}: include_prompt is false: treadle pools all tokens of a text, "
            f"those of the default prompt {prompt!r:.60} too"
        )
    return prompt
