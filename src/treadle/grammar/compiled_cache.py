"""Cache of compiled grammars, for requests that use the same ones."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable

from treadle.base.fork_safety import free_lock, register_after_fork
from treadle.errors import GrammarError, of_setting
from treadle.grammar.grammar import Grammar, Matcher
from treadle.grammar.json_schema import Schema, schema_text
from treadle.tokenizer.tokenizer import Tokenizer

MOST_BYTES = 256 << 20  # of all cached grammars, as in ``Grammar.n_bytes``


def check_one(*given: object) -> None:
    """Raise GrammarError if more than one of the arguments (a grammar, a schema, a regex, a
    constraint) is not None.
    """
    if sum(each is not None for each in given) > 1:
        raise GrammarError("a grammar, a JSON schema, a regex or a constraint: choose one")


class Grammars:
    """Least-recently-used cache of a tokenizer's compiled grammars, by a hash of their sources.
    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiled: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._lock = free_lock()
        register_after_fork(self)

    def after_fork(self) -> None:
        """Clear the cache in a forked child: another thread may have been using a grammar."""
        self._compiled.clear()

    def get(self, kind: str, source: str, build: Callable[[], Grammar]) -> Grammar:
        """Return the cached grammar of ``kind`` and ``source``, or build and cache it. Raises what
        ``build`` raises.
        """
        key = kind, hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            result = self._compiled.get(key)
        result = result or build()
        with self._lock:
            self._compiled[key] = result
            self._compiled.move_to_end(key)
            self._bound()
        return result

    def _bound(self) -> None:
        """Free memory above MOST_BYTES, least recently used first: first the shared lexers, which
        are soon rebuilt, then grammars.
        """
        left = sum(each.n_bytes for each in self._compiled.values())
        for each in self._compiled.values():
            if left > MOST_BYTES:
                left -= each.n_bytes
                each.forget()
                left += each.n_bytes
        while left > MOST_BYTES:
            left -= self._compiled.popitem(last=False)[1].n_bytes

    @of_setting("grammar")
    def gbnf(self, grammar: str) -> Grammar:
        """Return the compiled form of a grammar in llama.cpp's notation. Raises GrammarError for an
        invalid one.
        """
        if not isinstance(grammar, str):
            raise GrammarError(f"the grammar is {type(grammar).__name__}: expected a str")
        return self.get("gbnf", grammar, lambda: Grammar.from_gbnf(grammar, self.tokenizer))

    @of_setting("json_schema")
    def schema(self, schema: Schema, *, lenient: bool = False) -> Grammar:
        """Return the compiled grammar of a JSON schema; ``lenient`` as in
        ``Grammar.from_json_schema``. Raises GrammarError for one that is invalid or cannot be
        enforced.
        """
        text = schema_text(schema)
        return self.get(
            f"schema {lenient}",
            text,
            lambda: Grammar.from_json_schema(text, self.tokenizer, lenient=lenient),
        )

    @of_setting("regex")
    def regex(self, pattern: str) -> Grammar:
        """Return the grammar of answers that match ``pattern`` as a whole. Raises GrammarError for
        an invalid one.
        """
        if not isinstance(pattern, str):
            raise GrammarError(f"the regex is {type(pattern).__name__}: expected a str")
        try:
            pattern.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise GrammarError(f"the regex is not valid Unicode: {error}") from None
        return self.get("regex", pattern, lambda: Grammar.from_regex(pattern, self.tokenizer))

    def lark(self, source: str) -> Grammar:
        """Return the compiled form of a grammar in llguidance's notation; parts of its schemas that
        cannot be enforced become warnings. Raises GrammarError for an invalid one.
        """
        return self.get(
            "lark", source, lambda: Grammar.from_lark(source, self.tokenizer, lenient=True)
        )

    def matcher(
        self, grammar: str | None, schema: Schema | None, regex: str | None, own: object = None
    ) -> Matcher | None:
        """Return a matcher of the grammar, schema or regex that is not None; None if all are.
        ``own``: a constraint of the caller's, beside which none of these may be given. Raises
        GrammarError for several of them, and for one that is invalid.
        """
        check_one(grammar, schema, regex, own)
        if grammar is not None:
            return self.gbnf(grammar).matcher()
        if regex is not None:
            return self.regex(regex).matcher()
        return None if schema is None else self.schema(schema).matcher()
