"""The tokenizers of the tokenizers' tests serve here too."""

from tests.tokenizer.conftest import bytes_tokenizer, load

__all__ = ["bytes_tokenizer", "load"]
