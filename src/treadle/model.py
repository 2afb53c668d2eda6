"""A model as a library user sees it: text in, text out."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.batch import Part
from treadle.convert.open import open_model
from treadle.errors import (
    ContextFullError,
    GrammarError,
    SamplingError,
    TemplateError,
    TreadleError,
)
from treadle.generation import Generation, stop_strings
from treadle.models.config import load_config
from treadle.runtime.machine import usable_threads
from treadle.sampling import Sampler, Sampling
from treadle.session import Engine, Session

if TYPE_CHECKING:
    from treadle.plan import Plan
    from treadle.text.template import ChatTemplate
    from treadle.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096  # tokens; the model's own, where that is smaller
Progress = Callable[[str, int, int], None]


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    context: int | None = None,
    deterministic: bool = False,
    kv: str = "f16",
    n_sequences: int = 1,
    isa: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Open a GGUF file (or the first shard of one), or a Hugging Face directory; without a path,
    the small model inside the package.

    The file is mapped, not read. ``threads``: None for as many as this machine has performance
    cores to use; ``context``: tokens a sequence may hold, None for the model's own up to 4096;
    ``deterministic``: results do not depend on what else is in a batch; ``kv``: keys and values as
    "f16", "bf16", "f32" or "q8_0"; ``n_sequences``: full sequences to hold at once; ``isa``: an
    instruction set's name, None for the best here; ``progress(stage, done, total)`` is called
    during long work.

    Raises FileError, UnsupportedError, and TreadleError for settings out of range.
    """
    return Model(
        path,
        threads=threads,
        context=context,
        deterministic=deterministic,
        kv=kv,
        n_sequences=n_sequences,
        isa=isa,
        progress=progress,
    )


class Model:
    """A loaded model; see ``load``. Use it as a context manager, or ``close`` it, to stop its
    threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        threads: int | None,
        context: int | None,
        deterministic: bool,
        kv: str,
        n_sequences: int,
        isa: str | None,
        progress: Progress | None,
    ) -> None:
        from treadle.isa import choose
        from treadle.jit.compile import host_features

        began = time.perf_counter()
        if threads is not None and not 1 <= _integer("threads", threads) <= 1024:
            raise TreadleError(f"threads={threads}: expected 1 to 1024")
        if context is not None and _integer("context", context) < 1:
            raise TreadleError(f"context={context}: expected at least 1")
        if _integer("n_sequences", n_sequences) < 1:
            raise TreadleError(f"n_sequences={n_sequences}: expected at least 1")
        self.path = packaged_model() if path is None else Path(path)
        self.gguf = open_model(self.path)
        self.config = load_config(self.gguf)
        self.n_threads = threads or usable_threads()[0]
        self.n_ctx = context or min(self.config.n_ctx_train, DEFAULT_CONTEXT)
        self.isa = choose(host_features(), isa)
        self.engine = Engine(
            self.gguf,
            self.config,
            self.isa,
            n_threads=self.n_threads,
            n_ctx=self.n_ctx,
            kv=kv,
            n_sequences=n_sequences,
            deterministic=deterministic,
            progress=progress,
        )
        self.load_s = time.perf_counter() - began

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built when it is first needed."""
        from treadle.text.tokenizer import load_tokenizer

        return load_tokenizer(self.gguf)

    @cached_property
    def template(self) -> ChatTemplate:
        """The file's chat template, or the built-in one of its family."""
        from treadle.text.template import load_template

        template = load_template(self.gguf, self.config.arch.name)
        template.prepare()
        return template

    @cached_property
    def _session(self) -> Session:
        """Where ``generate`` and ``chat`` keep what they have read, so that a next prompt with the
        same start is quick.
        """
        return self.session()

    def session(self) -> Session:
        """A new sequence of tokens of its own. Close it to give its pages back."""
        return Session(self.engine)

    # -- text -----------------------------------------------------------------------------------

    def tokenize(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """Token ids. ``bos`` None: as the file says; ``special``: names of control tokens in the
        text become those tokens.
        """
        if not isinstance(text, str):
            raise TreadleError(f"the text is {type(text).__name__}: expected a str")
        return self.tokenizer.encode(text, bos=bos, special=special)

    def detokenize(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; control tokens only with ``special``."""
        try:
            return self.tokenizer.decode(_token_ids(ids), special=special)
        except IndexError as error:
            raise TreadleError(str(error)) from None

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Iterable[str] | None = (),
        grammar: str | None = None,
        json_schema: str | dict[str, Any] | None = None,
        session: Session | None = None,
    ) -> Generation:
        """Complete a prompt: an iterator of pieces of text.

        ``stop``: the text ends before this, or before any of these; ``grammar``: GBNF text that the
        completion must follow; ``json_schema``: a schema it must satisfy; ``session``: whose pages
        to use, None for the model's own.

        Raises ContextFullError for a prompt longer than the context, GrammarError, SamplingError.
        """
        ids = self._read(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not ids:
            raise TreadleError("the prompt is empty: there is no token to go on from")
        if not isinstance(sampling, Sampling | None):
            found = type(sampling).__name__
            raise SamplingError(f"sampling is {found}: expected a treadle.Sampling")
        if max_tokens is not None:
            _integer("max_tokens", max_tokens)
        constraint = self._constraint(grammar, json_schema)
        tokenizer = self.tokenizer
        sampler = Sampler(
            sampling or Sampling(),
            self.config.n_vocab,
            eog=tokenizer.eog,
            tokenizer=tokenizer,
            constraint=constraint,
        )
        return Generation(
            session or self._session,
            tokenizer,
            sampler,
            ids,
            max_tokens=max_tokens,
            stop=stop,
            load_s=self.load_s,
        )

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Generation:
        """Answer a conversation: ``messages`` of ``{"role", "content"}``; ``settings`` are those of
        ``generate``. ``content`` is a text, or a list of parts ``{"type": "text", "text"}``.

        A last message of the assistant is gone on with: words put into the model's mouth. Raises
        TemplateError too, and UnsupportedError for parts that are no text.
        """
        template, tokenizer = self.template, self.tokenizer  # one starts while the other is built
        text = self.chat_prompt(messages, tools=tools)
        settings["stop"] = (*stop_strings(settings.get("stop")), *template.stop)
        bos = tokenizer.bos
        starts = bos is not None and text.startswith(tokenizer.piece(bos))
        return self.generate(self.tokenize(text, bos=False if starts else None), **settings)

    def chat_prompt(
        self, messages: Sequence[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The text that the model's template makes of a conversation."""
        from treadle.text.messages import joined, read_messages

        _check_messages(messages)
        *earlier, last = messages
        if last["role"] != "assistant" or not earlier:
            return self.template.render(list(messages), add_generation_prompt=True, tools=tools)
        asked = self.template.render(earlier, add_generation_prompt=True, tools=tools)
        return f"{asked}{joined(read_messages(messages)[-1].get('content'))}"

    def _constraint(self, grammar: str | None, json_schema: str | dict[str, Any] | None) -> Any:
        if grammar is None and json_schema is None:
            return None
        from treadle.text.grammar import Grammar

        if grammar is not None and json_schema is not None:
            raise GrammarError("a grammar and a JSON schema at once: choose one")
        if grammar is not None:
            if not isinstance(grammar, str):
                raise GrammarError(f"the grammar is {type(grammar).__name__}: expected a str")
            return Grammar.from_gbnf(grammar, self.tokenizer).matcher()
        assert json_schema is not None
        return Grammar.from_json_schema(json_schema, self.tokenizer).matcher()

    # -- numbers --------------------------------------------------------------------------------

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of ``ids``, float32 ``[n_tokens, n_vocab]``. Raises
        ContextFullError.
        """
        ids = _token_ids(ids)
        self._make_room(len(ids))
        session = self.session()
        try:
            return session.logits(ids)
        finally:
            session.close()

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """Mean of the last layer's normed states over each text's tokens, of length 1.

        float32 ``[n_texts, n_embd]``; one text is a list of one. Raises ContextFullError.
        """
        texts = [texts] if isinstance(texts, str) else _listed("texts", texts)
        out = np.zeros((len(texts), self.config.n_embd), np.float32)
        for row, text in zip(out, texts, strict=True):
            ids = self._read(text)
            self._make_room(len(ids))
            row[:] = self.engine.embed(ids)
        return out

    def _read(self, text: str) -> list[int]:
        ids = self.tokenize(text)
        if not ids:
            raise TreadleError("the text is empty, and this model has no token to begin one with")
        return ids

    def _make_room(self, n_tokens: int) -> None:
        """If only the model's own session is in the way, its text can be read again later."""
        try:
            self.engine.cache.check_room(self.engine.cache.sequence(), n_tokens)
        except ContextFullError:
            if "_session" in vars(self):
                self._session.reset()

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """The steps that a batch of ``n_tokens`` runs."""
        return self.engine.plan(n_tokens, n_outputs)

    def profile(self, n_tokens: int = 1, depth: int = 0) -> list[tuple[str, float]]:
        """Seconds of each step, by label, of one run of ``n_tokens`` (at most 512) behind ``depth``
        others.
        """
        self._make_room(depth + n_tokens)
        session = self.session()
        try:
            if depth:
                session.feed([0] * depth)
            return self.engine.run_timed([Part(session.seq, [0] * n_tokens)])
        finally:
            session.close()

    def close(self) -> None:
        """Stop the threads and let go of the file."""
        self.engine.close()
        self.gguf.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _integer(name: str, value: object) -> int:
    """``value``, which must be a whole number; numpy's are as good as Python's."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TreadleError(f"{name}={value!r:.40}: expected an integer") from None


def _listed(name: str, values: Any) -> list[Any]:
    """``values`` as a list. Text and bytes could be one as well, but were not meant so."""
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise TreadleError(f"{name}: expected a list, found {type(values).__name__}")
    return list(values)


def _token_ids(values: Any) -> list[int]:
    return [_integer("a token id", value) for value in _listed("token ids", values)]


def _check_messages(messages: Any) -> None:
    """A conversation has messages, and each tells whose it is and what it says."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        raise TemplateError(f"the messages are {found}: expected a list of role and content")
    if not messages:
        raise TemplateError("a conversation without a message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = type(message).__name__
            raise TemplateError(f"message {i} is {found}: expected a dict of role and content")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {i} has no role, such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise TemplateError(f"message {i} has no content")


def packaged_model() -> Path:
    """The small model that ships inside the package."""
    return Path(__file__).resolve().parent / "data" / "demo.gguf"
