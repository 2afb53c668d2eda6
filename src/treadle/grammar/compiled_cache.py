"""Compiled grammars that are kept: many texts follow the same one."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable

from treadle.base.fork_safety import free_lock, tell
from treadle.errors import GrammarError, of_setting
from treadle.grammar.grammar import Grammar, Matcher
from treadle.grammar.json_schema import Schema, schema_text
from treadle.tokenizer.tokenizer import Tokenizer

MOST_BYTES = 256 << 20  # of all that are kept, as ``Grammar.n_bytes`` has them


def check_one(*given: object) -> None:
    """Raise GrammarError for more than one of a grammar, a schema, a regex and a constraint."""
    if sum(each is not None for each in given) > 1:
        raise GrammarError("a grammar, a JSON schema, a regex or a constraint: choose one")


class Grammars:
    """The last of one tokenizer, by the hash of their sources. Threads may come here together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._kept: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._lock = free_lock()
        tell(self)

    def after_fork(self) -> None:
        """In a forked child: another thread may have been inside of one."""
        self._kept.clear()

    def get(self, kind: str, source: str, build: Callable[[], Grammar]) -> Grammar:
        """The grammar of a source, built where it is not kept. Raises what ``build`` does."""
        key = kind, hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            made = self._kept.get(key)
        made = made or build()
        with self._lock:
            self._kept[key] = made
            self._kept.move_to_end(key)
            self._bound()
        return made

    def _bound(self) -> None:
        """First lexers go, oldest first, which are soon made again; then whole grammars."""
        left = sum(each.n_bytes for each in self._kept.values())
        for each in self._kept.values():
            if left > MOST_BYTES:
                left -= each.n_bytes
                each.forget()
                left += each.n_bytes
        while left > MOST_BYTES:
            left -= self._kept.popitem(last=False)[1].n_bytes

    @of_setting("grammar")
    def gbnf(self, grammar: str) -> Grammar:
        """llama.cpp's notation. Raises GrammarError."""
        if not isinstance(grammar, str):
            raise GrammarError(f"the grammar is {type(grammar).__name__}: expected a str")
        return self.get("gbnf", grammar, lambda: Grammar.from_gbnf(grammar, self.tokenizer))

    @of_setting("json_schema")
    def schema(self, schema: Schema, *, lenient: bool = False) -> Grammar:
        """JSON of a schema; ``lenient`` as in ``Grammar.from_json_schema``. Raises GrammarError."""
        text = schema_text(schema)
        return self.get(
            f"schema {lenient}",
            text,
            lambda: Grammar.from_json_schema(text, self.tokenizer, lenient=lenient),
        )

    @of_setting("regex")
    def regex(self, pattern: str) -> Grammar:
        """A whole answer that matches. Raises GrammarError."""
        if not isinstance(pattern, str):
            raise GrammarError(f"the regex is {type(pattern).__name__}: expected a str")
        try:
            pattern.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise GrammarError(f"the regex is no text: {error}") from None
        return self.get("regex", pattern, lambda: Grammar.from_regex(pattern, self.tokenizer))

    def lark(self, source: str) -> Grammar:
        """llguidance's notation; what it cannot enforce of schemas is a warning."""
        return self.get(
            "lark", source, lambda: Grammar.from_lark(source, self.tokenizer, lenient=True)
        )

    def matcher(
        self, grammar: str | None, schema: Schema | None, regex: str | None, own: object = None
    ) -> Matcher | None:
        """Of the one that is given, if one is; ``own``: a constraint of the caller's. Raises
        GrammarError.
        """
        check_one(grammar, schema, regex, own)
        if grammar is not None:
            return self.gbnf(grammar).matcher()
        if regex is not None:
            return self.regex(regex).matcher()
        return None if schema is None else self.schema(schema).matcher()
