"""Grammars that an answer must obey: GBNF, JSON schema, regular expressions and Lark.

``llguidance`` does the parsing. Nothing that it cannot honour is let through: a schema with a
keyword that it lacks is an error, and so is a token that the grammar has no place for.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.errors import GrammarError
from treadle.text.gbnf import parse_gbnf
from treadle.text.lexing import larks
from treadle.text.vocab import TokenType

if TYPE_CHECKING:
    from treadle.text.tokenizer import Tokenizer


# What follows in angle brackets is a dump of the parser, for its authors.
_DUMP = re.compile(r"\n<(?:state|backtrace)>")
_ENDLESS = "NoExtensionBias"  # llguidance's word for a start that needs itself first


@dataclass(frozen=True)
class Grammar:
    """A checked grammar over a vocabulary, for any number of answers.

    ``source`` is in llguidance's notation.

    Every ``from_`` raises GrammarError with the place when the grammar is broken or asks for
    something that cannot be enforced.
    """

    source: str
    tokenizer: Tokenizer

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Grammar:
        """llama.cpp's notation, matched from its rule ``root``."""
        return cls._checked(next(larks(parse_gbnf(text))), tokenizer)

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any] | bool, tokenizer: Tokenizer
    ) -> Grammar:
        """JSON that is valid by a schema, given as text or as the parsed object."""
        from llguidance import LLMatcher

        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            source = LLMatcher.grammar_from_json_schema(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as e:
            raise GrammarError(f"JSON schema: {e}") from None
        return cls._checked(source, tokenizer)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer) -> Grammar:
        """A whole answer that matches a regular expression (Rust's syntax, no look-around)."""
        from llguidance import LLMatcher

        return cls._checked(LLMatcher.grammar_from_regex(pattern), tokenizer)

    @classmethod
    def from_lark(cls, text: str, tokenizer: Tokenizer) -> Grammar:
        """llguidance's own notation, from its rule ``start``; terminals are lexed greedily."""
        from llguidance import LLMatcher

        return cls._checked(LLMatcher.grammar_from_lark(text), tokenizer)

    @classmethod
    def _checked(cls, source: str, tokenizer: Tokenizer) -> Grammar:
        from llguidance import LLMatcher

        # A warning is about something that would not be enforced: an error as well.
        _, messages = LLMatcher.validate_grammar_with_warnings(source, _vocabulary(tokenizer))
        if messages:
            raise GrammarError("; ".join(map(_in_words, messages)))
        return cls(source, tokenizer)

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        return Matcher(self)


class Matcher:
    """Where one answer stands in its grammar.

    For each token: ``mask`` the logits, choose, ``accept`` the choice. At the end of the
    grammar only tokens that end generation are left.
    """

    def __init__(self, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        vocabulary = _vocabulary(grammar.tokenizer)
        self._n: int = vocabulary.vocab_size
        self._matcher = LLMatcher(vocabulary, grammar.source, log_level=0)
        self._check()

    def mask(self, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Set the logits [n_vocab] of every token that may not come next to -inf, in place.

        Logits past the vocabulary (padding rows of a model) are never allowed. Raises
        GrammarError when nothing may come next and the text is not whole.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()  # in its state of error the matcher allows the end of the text
        allowed = np.unpackbits(bits, count=min(len(logits), 8 * len(bits)), bitorder="little")
        if not allowed.any() and not self.accepting:
            raise GrammarError("the grammar leaves no token that could come next")
        logits[: len(allowed)][allowed == 0] = -np.inf
        logits[len(allowed) :] = -np.inf

    def accept(self, token: int) -> None:
        """Go on with ``token``. Raises GrammarError when the grammar has no place for it."""
        if not 0 <= token < self._n or not self._matcher.consume_token(token):
            self._check()
            raise GrammarError(f"the grammar does not allow token {token} here")

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is whole; it may be possible to go on."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Whether the answer is whole and nothing but its end can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        if not self._matcher.rollback(n):
            self._check()
            raise GrammarError(f"there are no {n} tokens to take back")

    def copy(self) -> Matcher:
        """A second matcher in the same state, to try something out."""
        other = object.__new__(Matcher)
        other._n, other._matcher = self._n, self._matcher.deep_copy()
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_in_words(str(self._matcher.get_error())))


def _in_words(message: str) -> str:
    """llguidance's message in one line, without the marks that point into another."""
    message = _DUMP.split(message)[0]
    if message == _ENDLESS:
        return "rule root (of a schema, its $ref) only leads back to itself: no text fulfils it"
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))


# Building one takes 60 ms for 32,000 tokens and 300 ms for 128,000: once for each tokenizer.
_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> Any:
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = TokenizerWrapper(_Bytes(tokenizer))
        found = LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eog) or None)
        _VOCABULARIES[tokenizer] = found
    return found


class _Bytes:
    """A vocabulary as llguidance wants it; a weak reference, for llguidance keeps this."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        n = tokenizer.n_vocab
        self._tokenizer = weakref.ref(tokenizer)
        self.tokens = tokenizer.all_token_bytes()
        hidden = tokenizer.vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
        self.special_token_ids = sorted(tokenizer.eog.union(hidden))
        self.bos_token_id = tokenizer.bos
        if tokenizer.eog:
            self.eos_token_id = min(tokenizer.eog)
        else:  # no token ends this model's texts; the grammar needs one to stand for the end
            self.eos_token_id = n
            self.tokens.append(b"<treadle:end>")
            self.special_token_ids.append(n)

    def __call__(self, text: bytes | str) -> list[int]:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return []
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return tokenizer.encode_plain(text, start=False)
