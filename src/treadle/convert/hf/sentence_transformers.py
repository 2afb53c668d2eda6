"""sentence-transformers' preprocessing of texts, read from the files of its folders.

sentence_bert_config.json has the maximum length and lower-casing; config_sentence_transformers.json
has the prompts by name, and the default one, which is put before a text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.convert.hf.pooling import pooling_file
from treadle.convert.hf.tokenizer.sentence_settings import sentences_file
from treadle.convert.hf.tokenizer.special_tokens import read_optional
from treadle.errors import UnsupportedError
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import ARCHS
from treadle.models.sentence import MAX_TOKENS, PROMPT

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig


PROMPTS = "config_sentence_transformers.json"
MODULES = "modules.json"
_TOKENIZER = "tokenizer_config.json"
# Arguments for transformers' config and tokenizer, in older and newer spelling.
_ARGUMENTS = ("config_args", "config_kwargs", "tokenizer_args", "processor_kwargs")
_HARMLESS = (  # no effect on the vector of a text that is not truncated
    *("trust_remote_code", "attn_implementation", "use_fast", "use_cache"),
    *("padding", "padding_side", "truncation", "truncation_side"),
)


def read_sentences(folder: Path) -> dict[str, Any]:
    """Return treadle's metadata keys for embedding texts: the maximum number of tokens, and the
    default prompt. Raises FileError and UnsupportedError.
    """
    result: dict[str, Any] = {}
    _refuse_arguments(folder)
    if limit := _max_seq_length(folder):
        result[MAX_TOKENS] = limit
    if prompt := _default_prompt(folder):
        result[PROMPT] = prompt
    return result


def read_query(folder: Path, hyper: HfConfig) -> dict[str, Any]:
    """Return the key of the prompt that a cross-encoder puts before the query; {} if there is none.
    Raises FileError, and UnsupportedError if the model is not an encoder.
    """
    prompt = _default_prompt(folder)
    if prompt and ARCHS[hyper.family.arch].graph != "encoder":
        what = "treadle supports default prompts only for rerankers that are encoders"
        raise UnsupportedError(f"{folder / PROMPTS}: default_prompt_name: {what}")
    return {PROMPT: prompt} if prompt else {}


def _refuse_arguments(folder: Path) -> None:
    """Raise UnsupportedError for arguments that override config.json or the tokenizer's files."""
    path = sentences_file(folder)
    said = MetadataReader(read_optional(path), path)
    for given in filter(None, map(said.within, _ARGUMENTS)):
        for key, value in given.values.items():
            if value is not None and key not in _HARMLESS:
                given.refuse(key, f"is {value!r:.60}: this setting is not supported")


def _max_seq_length(folder: Path) -> int:
    """Return the maximum number of tokens of a text; 0: only the model's limit applies. Without
    ``max_seq_length``, the tokenizer's ``model_max_length`` applies.
    """
    path = sentences_file(folder)
    sentences = MetadataReader(read_optional(path), path)
    if sentences.get("max_seq_length") is not None:
        return sentences.integer("max_seq_length", hi=POSITION_MAX)
    if not os.path.lexists(folder / MODULES):  # not a sentence-transformers folder
        return 0
    tokenizer = MetadataReader(read_optional(folder / _TOKENIZER), folder / _TOKENIZER)
    most = tokenizer.number("model_max_length", 0.0, lo=0.0, hi=1e300)
    return int(most) if most < POSITION_MAX else 0  # transformers writes 1e30 for none


def _default_prompt(folder: Path) -> str:
    said = MetadataReader(read_optional(folder / PROMPTS), folder / PROMPTS)
    if said.get("default_prompt_name") is None:
        return ""
    name = said.text("default_prompt_name")
    prompts = said.within("prompts")
    prompt = prompts.text(name, "") if prompts else ""
    if prompts is None or prompts.get(name) is None:
        names = ", ".join(prompts.values) if prompts else "no names"
        said.fail("default_prompt_name", f"is {name!r:.60}", f"one of prompts: {names:.120}")
    pooling = pooling_file(folder)
    if prompt and read_optional(pooling).get("include_prompt") is False:
        raise UnsupportedError(
            f"{pooling}: include_prompt is false: treadle pools all tokens, "
            f"including those of the default prompt {prompt!r:.60}"
        )
    return prompt
