"""Grammars that an answer must follow: GBNF, JSON schema, regular expressions and Lark.

``llguidance`` parses them. Anything that it cannot enforce is an error: an unsupported schema
keyword, or a token that the grammar does not allow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property, dataclass
from treadle.base.fork_safety import free_lock
from treadle.base.interrupts import interrupts_held
from treadle.errors import GrammarError
from treadle.grammar.async_mask import AsyncBits
from treadle.grammar.gbnf import parse_gbnf
from treadle.grammar.json_schema import Schema, schema_source
from treadle.grammar.lexemes import hard_rules, lark_forms, special_tokens
from treadle.grammar.token_bytes import vocabulary_of

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer


# Beginning of the parser's debug dump in a message.
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
_ENDLESS = "NoExtensionBias"  # llguidance's message if the start rule begins with itself


@dataclass(frozen=True)
class Grammar:
    """Checked grammar over a vocabulary, for any number of answers.

    ``source``: the grammar in llguidance's notation. ``hard``: names of the slowest rules, for
    messages. ``warnings``: schema parts that are not enforced, if that was allowed.

    Every ``from_`` method raises GrammarError, with the place, for a grammar that is broken or
    cannot be enforced.
    """

    source: str
    tokenizer: Tokenizer
    hard: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Grammar:
        """Compile a grammar in llama.cpp's notation; answers must match its rule ``root``."""
        try:
            rules = parse_gbnf(text)
            for name, line in special_tokens(rules):
                if not _has_token(name, tokenizer):
                    raise GrammarError(f"grammar, line {line}: the vocabulary has no token {name}")
            message = ""
            for source in lark_forms(rules):
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
        """Compile the grammar of JSON values that satisfy a schema: JSON text, the parsed object,
        or a class or object with ``model_json_schema``, such as pydantic's. ``lenient``: parts that
        cannot be enforced are left out and listed in ``warnings``.

        Between two tokens of the JSON there is at most one space, or a line break and 20 characters
        of white space.
        """
        (source, left_out), of = schema_source(schema, lenient=lenient), "JSON schema"
        own: Any = {"large": of, "lenient": lenient, "left_out": left_out}
        return cls._checked(source, tokenizer, f"{of}: ", **own)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer) -> Grammar:
        """Compile a regular expression (Rust's syntax, no look-around) that answers must match as a
        whole.
        """
        from llguidance import LLMatcher

        return cls._checked(LLMatcher.grammar_from_regex(pattern), tokenizer, large="regex")

    @classmethod
    def from_lark(cls, text: str, tokenizer: Tokenizer, *, lenient: bool = False) -> Grammar:
        """Compile a grammar in llguidance's Lark notation; answers must match its rule ``start``,
        and terminals are lexed greedily. ``lenient``: llguidance's messages about its schemas
        become warnings.
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
        """Return the name of the parser limit that the first two tokens exceed, or "". Two are
        needed because llguidance finds the length of a fixed text only when a token is accepted.
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
        """Return a matcher at the beginning of an answer. It is a copy, since building one takes
        milliseconds, and shares the lexer states that other answers have computed.
        """
        with _COPYING:
            result = self._first.copy()
        result.shares = True
        return result

    @property
    def n_bytes(self) -> int:
        """Estimated bytes of memory: 200,000, 100 for each character of the source (measured: 70 to
        330), and LEXER_BYTES for the lexer that all matchers share, once there is one.
        """
        return 200_000 + 100 * len(self.source) + LEXER_BYTES * ("_first" in self.__dict__)

    def forget(self) -> None:
        """Drop the lexer that matchers share; the next matcher starts with a new one."""
        with _COPYING:
            self.__dict__.pop("_first", None)

    @cached_property
    def _first(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """State of one answer in its grammar.

    For each token: ``mask`` the logits, choose, ``accept`` the choice. At the end of the grammar
    only tokens that end generation are allowed.

    Ctrl-C is deferred to the end of a call: llguidance calls the tokenizer, in Python, and would
    report an exception there as an error of the grammar.
    """

    def __init__(self, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        vocabulary = vocabulary_of(grammar.tokenizer)
        self._n: int = vocabulary.vocab_size
        self._grammar = grammar
        self._ids: list[int] = []  # accepted tokens
        self._async_bits: AsyncBits | None = None
        self.shares = False  # whether it shares its lexer with other answers
        self._matcher = LLMatcher(vocabulary, grammar.source, log_level=0, limits=_limits())
        self._check()

    def mask(self, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Set the logits ``[n_vocab]`` of tokens that may not come next to -inf, in place.

        Logits beyond the vocabulary (padding rows of a model) are never allowed. Raises
        GrammarError if no token may come next and the answer is incomplete.
        """
        bits = np.frombuffer(self.bits(), np.uint8)
        allowed = np.unpackbits(bits, count=min(len(logits), 8 * len(bits)), bitorder="little")
        if not allowed.any() and not self.accepting:
            raise GrammarError(f"{self._place}the grammar allows no next token")
        logits[: len(allowed)][allowed == 0] = -np.inf
        logits[len(allowed) :] = -np.inf

    def bits(self) -> bytes:
        """Return the mask of tokens that may come next, one bit each, the lowest id in the lowest
        bit. Raises GrammarError if the matcher is in its error state.
        """
        with interrupts_held():
            made = self._matcher.compute_bitmask()
            if self._replay_with_new_lexer():
                made = self._matcher.compute_bitmask()
        self._check()  # in its error state the matcher allows end tokens
        return bytes(made)

    def start_bits(self) -> AsyncBits:
        """Start computing ``bits`` in a background thread. Wait for the result before ``accept``,
        ``rollback`` or ``copy``.
        """
        self._async_bits = AsyncBits(self)
        return self._async_bits

    def forced(self) -> list[int]:
        """Return the ids of text that must come next, without accepting them. They are a guess: the
        model may split the text into other tokens.
        """
        if self._async_bits is not None:  # left from a run that was stopped
            self._async_bits.wait()
        with interrupts_held():
            return list(self._matcher.compute_ff_tokens())

    def accept(self, token: int) -> None:
        """Advance by ``token``. Raises GrammarError if the grammar does not allow it."""
        with interrupts_held():
            fits = 0 <= token < self._n and self._matcher.consume_token(token)
            if not fits and not (
                self._replay_with_new_lexer() and self._matcher.consume_token(token)
            ):
                self._check(token)
                raise GrammarError(f"{self._place}the grammar does not allow {self._named(token)}")
            self._ids.append(token)

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is complete; more text may still be allowed."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Whether the answer is complete and no more text is allowed."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted tokens. Raises GrammarError if that is not possible."""
        if not self._matcher.rollback(n):
            self._check()
            raise GrammarError(f"cannot take back {n} tokens: {len(self._ids)} were accepted")
        if n > 0:
            del self._ids[-n:]

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        other = object.__new__(Matcher)
        other._n, other._matcher = self._n, self._matcher.deep_copy()
        other._grammar = self._grammar
        other._ids = list(self._ids)
        other._async_bits = None
        other.shares = self.shares
        return other

    def _replay_with_new_lexer(self) -> bool:
        """If the shared lexer has reached its limit of states, read the answer so far again with a
        new one, so that states of other answers do not end this one. Return whether that was done.
        """
        if not (self.shares and self._matcher.is_error()):
            return False
        if not _FULL.search(str(self._matcher.get_error())):
            return False
        self._grammar.forget()
        self.shares, self._matcher = False, Matcher(self._grammar)._matcher
        return not self._ids or bool(self._matcher.consume_tokens(self._ids))

    def _check(self, token: int | None = None) -> None:
        """Raise GrammarError if the matcher is in its error state; ``token``: the token that caused
        it, if any.
        """
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
        """Beginning of an error message: the number of accepted tokens and the end of
        their text.
        """
        if not self._ids:
            return "at the beginning: "
        ids = [id for id in self._ids[-32:] if id < self._grammar.tokenizer.n_vocab]
        return f"after {len(self._ids)} tokens (...{self._grammar.tokenizer.decode(ids)[-40:]!r}): "

    def _named(self, token: int) -> str:
        tokenizer = self._grammar.tokenizer
        piece = f" ({tokenizer.piece(token)!r})" if 0 <= token < tokenizer.n_vocab else ""
        return f"token {token}{piece}"


def _limits() -> Any:
    """Return llguidance's limits for one token. The longest computations that they allow take, with
    a vocabulary of 128,000, 20 ms for a fixed text or an object of 1000 properties, and 0.2 s for
    ambiguous recursion.

    ``step_max_items`` and ``max_items_in_row`` are above llguidance's defaults, which count for all
    tokens together and so refuse the first token of many grammars. ``initial_lexer_fuel`` is below:
    it bounds fixed text, which is found and tokenized again for every mask. ``max_lexer_states``
    bounds memory: a state takes about 1 kB.
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
    """Return whether llguidance rejects a grammar, and its messages: errors, and warnings about
    parts that would not be enforced.
    """
    from llguidance import LLMatcher

    vocabulary = vocabulary_of(tokenizer)
    found = LLMatcher.validate_grammar_with_warnings(source, vocabulary, limits=_limits())
    wrong, messages = found
    return bool(wrong), [_in_words(message) for message in messages]


def _has_token(name: str, tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has the special token ``<name>``, or the id in ``<[12]>``."""
    if name.startswith("<["):
        return int(name[2:-2][:20]) < tokenizer.n_vocab
    return tokenizer.token_id(name) is not None


def _in_words(message: str) -> str:
    """Return llguidance's message in one line, without its source excerpts and markers."""
    message = _SCHEMA.sub(r"JSON schema: \1\n", _DUMP.split(message)[0]).split("\n   1 |")[0]
    if message == _ENDLESS:
        return "rule root (or the schema's $ref) refers only to itself: no text can match"
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))


_COPYING = free_lock()
