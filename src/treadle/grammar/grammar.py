"""Grammars that an answer must obey: GBNF, JSON schema, regular expressions and Lark.

``llguidance`` does the parsing. Whatever it cannot enforce is an error: a schema keyword that it
lacks, or a token that the grammar does not allow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.cached_property import cached_property
from treadle.base.fast_dataclass import dataclass
from treadle.base.fork_safety import free_lock
from treadle.base.interrupts import interrupts_held
from treadle.errors import GrammarError
from treadle.grammar.async_mask import LateBits
from treadle.grammar.gbnf import parse_gbnf
from treadle.grammar.json_schema import Schema, schema_source
from treadle.grammar.lexemes import hard_rules, larks, special_tokens
from treadle.grammar.token_bytes import vocabulary_of

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer


# In angle brackets follows the parser's debug dump.
_DUMP = re.compile(r"\n<(?:state|backtrace|non-verbose)/?>")
_LIMIT = re.compile(
    r"Too many items \([^)]*\)|Current row has \d+ items; max is \d+"
    r"|too many expressions constructed|.*[Ll]exer.*(?:states|fuel).*"
)
_FULL = re.compile(r"too many states")
LEXER_BYTES = 20 << 20  # of a lexer with as many states as ``_limits`` allows: 15 to 18 MB
_BYTE = re.compile(r"byte .* fails")
_LARK_LINE = re.compile(r"^(?:at )?\d+\(\d+\): |\s*(?<!\S)\d+ \| .*", re.S)
_SCHEMA = re.compile(r".*failed to compile JSON schema: (.*?)\n", re.S)  # in a rule
_ENDLESS = "NoExtensionBias"  # llguidance's message: the start rule needs itself first


@dataclass(frozen=True)
class Grammar:
    """Checked grammar over a vocabulary, for any number of answers.

    ``source``: the grammar in llguidance's notation. ``hard``: the slowest rules, for messages.
    ``warnings``: schema parts that are not enforced, where that is allowed.

    Every ``from_`` method raises GrammarError, with the place, for a grammar that is broken or
    cannot be enforced.
    """

    source: str
    tokenizer: Tokenizer
    hard: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Grammar:
        """Return a grammar in llama.cpp's notation, matched from its rule ``root``."""
        try:
            rules = parse_gbnf(text)
            for name, line in special_tokens(rules):
                if not _has_token(name, tokenizer):
                    raise GrammarError(f"grammar, line {line}: the vocabulary has no token {name}")
            message = ""
            for source in larks(rules):
                lark = _lark(source)
                message = "; ".join(_complaints(lark, tokenizer)[1])
                if not message:
                    result = cls(lark, tokenizer, hard_rules(rules))
                    if not (message := result._too_large()):
                        return result
        except RecursionError:
            raise GrammarError("grammar: too deeply nested") from None
        # llguidance's message is about a line of its own notation, which the user has not seen.
        raise GrammarError(
            f"grammar: too large or too deeply nested ({_LARK_LINE.sub('', message)})"
        )

    @classmethod
    def from_json_schema(
        cls, schema: Schema, tokenizer: Tokenizer, *, lenient: bool = False
    ) -> Grammar:
        """Return the grammar of JSON that is valid by a schema: JSON text, the parsed object, or a
        class or object with ``model_json_schema``, such as pydantic's. ``lenient``: parts that
        cannot be enforced are left out and listed in ``warnings``.

        Between two tokens of the JSON there is at most a space, or a line break and 20 characters.
        """
        (source, left_out), of = schema_source(schema, lenient=lenient), "JSON schema"
        own: Any = {"large": of, "lenient": lenient, "left_out": left_out}
        return cls._checked(source, tokenizer, f"{of}: ", **own)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer) -> Grammar:
        """Return the grammar of answers that match a regular expression as a whole (Rust's syntax,
        no look-around).
        """
        from llguidance import LLMatcher

        return cls._checked(LLMatcher.grammar_from_regex(pattern), tokenizer, large="regex")

    @classmethod
    def from_lark(cls, text: str, tokenizer: Tokenizer, *, lenient: bool = False) -> Grammar:
        """Return a grammar in llguidance's notation, from its rule ``start``; terminals are lexed
        greedily. ``lenient``: messages about its schemas are warnings.
        """
        return cls._checked(_lark(text), tokenizer, lenient=lenient)

    @classmethod
    def _checked(
        cls,
        source: str,
        tokenizer: Tokenizer,
        of: str = "",
        *,
        large: str = "grammar",
        lenient: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> Grammar:
        wrong, messages = _complaints(source, tokenizer)
        if wrong or (messages and not lenient):
            raise GrammarError(of + "; ".join(messages))
        result = cls(source, tokenizer, warnings=(*left_out, *messages))
        if limit := result._too_large():
            several = "items" in limit
            what = "too ambiguous" if several else "repetitions or fixed strings are too long"
            raise GrammarError(f"{large}: too large: {what}: parser limit reached ({limit})")
        return result

    def _too_large(self) -> str:
        """Return the limit that the first two tokens exceed, or "". llguidance finds the length of
        a fixed text only when a token is accepted.
        """
        try:
            matcher = Matcher(self)  # its lexer is not kept: many schemas are only checked
            for _ in range(2):
                bits = np.unpackbits(np.frombuffer(matcher.bits(), np.uint8), bitorder="little")
                if not bits.any() or matcher.done:
                    break
                matcher.accept(int(bits.argmax()))
        except GrammarError as error:
            found = _LIMIT.search(str(error))
            return found.group().rstrip(")") if found else ""
        return ""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer: a copy, as building one takes
        milliseconds. It shares the lexer states that other answers have found.
        """
        with _COPYING:
            result = self._first.copy()
        result.shares = True
        return result

    @property
    def n_bytes(self) -> int:
        """Most bytes of memory that it takes, as measured: 330 to 70 for each character of a
        schema's source, and, once there are matchers, one full lexer that all share.
        """
        return 200_000 + 100 * len(self.source) + LEXER_BYTES * ("_first" in self.__dict__)

    def forget(self) -> None:
        """Drop the lexer that matchers share; the next matcher begins with an empty one."""
        with _COPYING:
            self.__dict__.pop("_first", None)

    @cached_property
    def _first(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """State of one answer in its grammar.

    For each token: ``mask`` the logits, choose, ``accept`` the choice. At the end of the grammar
    only tokens that end generation are left.

    Ctrl-C is deferred to the end of a call: llguidance calls the tokenizer, in Python, and would
    take an exception there for an error of the grammar.
    """

    def __init__(self, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        vocabulary = vocabulary_of(grammar.tokenizer)
        self._n: int = vocabulary.vocab_size
        self._grammar = grammar
        self._ids: list[int] = []  # accepted tokens
        self._late: LateBits | None = None
        self.shares = False  # whether it shares its lexer with other answers
        self._matcher = LLMatcher(vocabulary, grammar.source, log_level=0, limits=_limits())
        self._check()

    def mask(self, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Set the logits [n_vocab] of every token that may not come next to -inf, in place.

        Logits past the vocabulary (padding rows of a model) are never allowed. Raises GrammarError
        when no token may come next and the answer is incomplete.
        """
        bits = np.frombuffer(self.bits(), np.uint8)
        allowed = np.unpackbits(bits, count=min(len(logits), 8 * len(bits)), bitorder="little")
        if not allowed.any() and not self.accepting:
            raise GrammarError(f"{self._place}the grammar allows no next token")
        logits[: len(allowed)][allowed == 0] = -np.inf
        logits[len(allowed) :] = -np.inf

    def bits(self) -> bytes:
        """Return a bit for each token that may come next, the lowest first. Raises GrammarError."""
        with interrupts_held():
            made = self._matcher.compute_bitmask()
            if self._begins_anew():
                made = self._matcher.compute_bitmask()
        self._check()  # in its error state the matcher allows the end of the text
        return bytes(made)

    def later(self) -> LateBits:
        """Return ``bits``, computed by another thread. ``accept`` and others must wait for it."""
        self._late = LateBits(self)
        return self._late

    def forced(self) -> list[int]:
        """Return the ids of text that must come next. A guess: the text may be split into other
        tokens, and nothing is accepted.
        """
        if self._late is not None:  # of a run that was stopped, perhaps
            self._late.wait()
        with interrupts_held():
            return list(self._matcher.compute_ff_tokens())

    def accept(self, token: int) -> None:
        """Advance by ``token``. Raises GrammarError if the grammar does not allow it."""
        with interrupts_held():
            fits = 0 <= token < self._n and self._matcher.consume_token(token)
            if not fits and not (self._begins_anew() and self._matcher.consume_token(token)):
                self._check(token)
                raise GrammarError(f"{self._place}the grammar does not allow {self._named(token)}")
            self._ids.append(token)

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is complete; more may still follow."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Whether the answer is complete and only its end can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        if not self._matcher.rollback(n):
            self._check()
            raise GrammarError(f"cannot take back {n} tokens: {len(self._ids)} were accepted")
        if n > 0:
            del self._ids[-n:]

    def copy(self) -> Matcher:
        """Return a second matcher in the same state, to try something out."""
        other = object.__new__(Matcher)
        other._n, other._matcher = self._n, self._matcher.deep_copy()
        other._grammar = self._grammar
        other._ids = list(self._ids)
        other._late = None
        other.shares = self.shares
        return other

    def _begins_anew(self) -> bool:
        """Read the answer so far again with a lexer of its own if the shared one is full of states:
        those of other answers must not end this one. Return whether that was done.
        """
        if not (self.shares and self._matcher.is_error()):
            return False
        if not _FULL.search(str(self._matcher.get_error())):
            return False
        self._grammar.forget()
        self.shares, self._matcher = False, Matcher(self._grammar)._matcher
        return not self._ids or bool(self._matcher.consume_tokens(self._ids))

    def _check(self, token: int | None = None) -> None:
        """Raise the matcher's error, if any: about ``token`` if given, else about this place."""
        if not self._matcher.is_error():
            return
        message = _in_words(str(self._matcher.get_error()))
        limit = _LIMIT.search(message)
        if limit is not None:
            of = f", in {self._grammar.hard}" if self._grammar.hard else ""
            raise GrammarError(
                f"{self._place}the grammar is too ambiguous or too large{of}: parser limit reached "
                f"({limit.group()})"
            )
        if token is not None and 0 <= token < self._n:
            found = _BYTE.search(message)
            why = f": {found.group()}" if found else ""
            raise GrammarError(f"{self._place}the grammar does not allow {self._named(token)}{why}")
        raise GrammarError(f"{self._place if self._ids else ''}{message}")

    @property
    def _place(self) -> str:
        """Number of tokens so far and the end of their text, for messages."""
        if not self._ids:
            return "at the beginning: "
        ids = [id for id in self._ids[-32:] if id < self._grammar.tokenizer.n_vocab]
        return f"after {len(self._ids)} tokens (...{self._grammar.tokenizer.decode(ids)[-40:]!r}): "

    def _named(self, token: int) -> str:
        tokenizer = self._grammar.tokenizer
        piece = f" ({tokenizer.piece(token)!r})" if 0 <= token < tokenizer.n_vocab else ""
        return f"token {token}{piece}"


def _limits() -> Any:
    """Return the limits of one token on a vocabulary of 128,000: 20 ms for a fixed text or an
    object of 1000 properties, 0.2 s for ambiguous recursion.

    ``step_max_items`` and ``max_items_in_row`` are above llguidance's defaults, which count for all
    tokens together and so refuse the first token of many grammars. ``initial_lexer_fuel`` is below:
    it bounds text that leaves no choice, which is found and tokenized for every mask.
    ``max_lexer_states`` bounds memory: a state takes about 1 kB.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=6_000,
        initial_lexer_fuel=150_000,
        step_lexer_fuel=2_000_000,
        step_max_items=80_000,
        max_lexer_states=50_000,
        max_grammar_size=2_000_000,
        verbose_errors=False,
    )


def _lark(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(text))


def _complaints(source: str, tokenizer: Tokenizer) -> tuple[bool, list[str]]:
    """Return whether a grammar is broken, and llguidance's messages. A warning is about something
    that would not be enforced.
    """
    from llguidance import LLMatcher

    vocabulary = vocabulary_of(tokenizer)
    found = LLMatcher.validate_grammar_with_warnings(source, vocabulary, limits=_limits())
    wrong, messages = found
    return bool(wrong), [_in_words(message) for message in messages]


def _has_token(name: str, tokenizer: Tokenizer) -> bool:
    """Whether ``<name>`` or ``<[12]>`` is a special token that a grammar may use."""
    if name.startswith("<["):
        return int(name[2:-2][:20]) < tokenizer.n_vocab
    return tokenizer.token_id(name) is not None


def _in_words(message: str) -> str:
    """Return llguidance's message in one line, without marks that point into another line."""
    message = _SCHEMA.sub(r"JSON schema: \1\n", _DUMP.split(message)[0]).split("\n   1 |")[0]
    if message == _ENDLESS:
        return "rule root (or the schema's $ref) refers only to itself: no text can match"
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))


_COPYING = free_lock()
