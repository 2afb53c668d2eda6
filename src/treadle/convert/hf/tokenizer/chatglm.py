"""ChatGLM's vocabularies, which in transformers are read by code in the folder.

ChatGLM 3 has a sentencepiece model, GLM-4-9B a list of ranks. The code, not the file, names two
tokens that go before each text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.convert.hf.tokenizer.sentencepiece_model import read_sentencepiece
from treadle.convert.hf.tokenizer.tiktoken import is_tiktoken, read_ranks
from treadle.files.metadata import string_array
from treadle.files.reader import read_head
from treadle.tokenizer.vocab import TokenType

CHATGLM = ("chatglm",)
BEFORE = (("[gMASK]", "<sop>"), ("[gMASK]", "sop"))  # GLM-4-9B, ChatGLM 3
# ChatGLM 3's code numbers these after the last piece; the role tokens also end an answer.
_NAMES = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
_LINE = 4096  # bytes, enough for the first line of a list


def read_chatglm(path: Path) -> dict[str, Any]:
    """Return the constructor arguments of ``Pieces`` for ChatGLM's tokenizer.model. Raises
    FileError, UnsupportedError.
    """
    if is_tiktoken(read_head(path, _LINE, "a tokenizer")):
        letters, merges = read_ranks(path)
        return {
            "model": "gpt2",
            "texts": [text.encode() for text in letters],
            "types": [int(TokenType.NORMAL)] * len(letters),
            "keys": {"pre": "chatglm-bpe", "merges": string_array([m.encode() for m in merges])},
        }
    model = read_sentencepiece(path)
    return {
        "model": "llama",
        "texts": [*model.pieces, *(name.encode() for name in _NAMES)],
        "types": [*model.types, *[int(TokenType.CONTROL)] * len(_NAMES)],
        "scores": [*model.scores, *[0.0] * len(_NAMES)],
        "keys": {
            "pre": "chatglm-spm",
            "add_space_prefix": model.add_dummy_prefix,
            "remove_extra_whitespaces": model.remove_extra_whitespaces,
            "eot_token_id": len(model.pieces) + _NAMES.index("<|user|>"),
            "eom_token_id": len(model.pieces) + _NAMES.index("<|observation|>"),
        },
        "ids": model.ids,
    }
