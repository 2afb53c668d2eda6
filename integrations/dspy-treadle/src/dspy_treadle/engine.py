"""Engines of ``dspy.LM``, which answer canonical requests (``dspy.lm15``) with a loaded model."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import dspy
from dspy.lm15 import (
    ContextLengthError,
    InvalidRequestError,
    OpenAIChatLM,
    Request,
    Response,
    StreamDeltaEvent,
    StreamEndEvent,
    StreamStartEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    Usage,
    response_from_openai_chat,
)

import treadle

REASONS = {"tool_calls": "tool_call"}  # finish reasons that DSPy names otherwise
StreamEvent: TypeAlias = "StreamStartEvent | StreamDeltaEvent | StreamEndEvent"


def treadle_lm(
    model: treadle.Model | str | os.PathLike[str] | None = None,
    *,
    load_options: Mapping[str, Any] | None = None,
    answer_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dspy.LM:
    """Return a ``dspy.LM`` whose answers a model of this process writes.

    ``model``: a path, a name as ``treadle.load`` takes it, None for the small model inside treadle,
    or a ``treadle.Model``; a path is opened at the first call. ``load_options``: settings of
    ``treadle.load``; ``answer_options``: settings of ``Model.chat`` that DSPy lacks, such as
    ``repeat_penalty``; ``settings``: those of ``dspy.LM``. It is saved with a program, unless the
    model was given loaded.
    """
    engine = TreadleEngine(model, load_options=load_options, answer_options=answer_options)
    name = f"treadle/{engine.name}"
    return dspy.LM(name, engine=engine, async_engine=AsyncTreadleEngine(engine), **settings)


class TreadleEngine:
    """Answers requests in threads that call it; see ``treadle_lm`` for its options. Schemas are
    enforced by a grammar, tools may be called.
    """

    supports_function_calling = True
    supports_response_schema = True
    supports_reasoning = True
    supported_params = (
        "temperature",
        "max_tokens",
        "top_p",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
    )

    def __init__(
        self,
        model: treadle.Model | str | os.PathLike[str] | None = None,
        *,
        load_options: Mapping[str, Any] | None = None,
        answer_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._load_options = dict(load_options or {})
        self._answer_options = dict(answer_options or {})
        self._completions: treadle.ChatCompletions | None = None
        self._lock = threading.Lock()
        # DSPy's own writer of OpenAI's bodies; nothing is sent.
        self._writer = OpenAIChatLM(api_key="none")

    @property
    def name(self) -> str:
        """The model's name."""
        if isinstance(self._model, treadle.Model):
            return self._model.path.name.removesuffix(".gguf")
        return "demo" if self._model is None else os.fspath(self._model)

    @property
    def completions(self) -> treadle.ChatCompletions:
        """The model, loaded now at the latest. Raises the errors of ``treadle.load``."""
        with self._lock:
            if self._completions is None:
                model = treadle.load_shared(self._model, **self._load_options)
                self._completions = treadle.ChatCompletions(model)
            return self._completions

    def chat_of(self, request: Request) -> dict[str, Any]:
        """Return the arguments of ``ChatCompletions`` for a request."""
        body: dict[str, Any] = json.loads(self._writer.build_request(request, stream=False).body)
        if request.config.top_k is not None:  # OpenAI's API has none
            body["top_k"] = request.config.top_k
        return {**self._answer_options, **body}

    def complete(self, request: Request) -> Response:
        """Return a whole answer."""
        with as_dspy_errors():
            made = self.completions.create(**self.chat_of(request))
        return response_from_openai_chat(made, model=request.model)

    def stream(self, request: Request) -> Iterator[StreamEvent]:
        """Yield an answer as events."""
        events = EventWriter(request)
        with as_dspy_errors():
            yield events.start()
            for chunk in self.completions.stream(**self.chat_of(request)):
                yield from events.of(chunk)

    def close(self) -> None:
        """Let the model go; it is freed when nobody else uses it."""
        with self._lock:
            self._completions = None

    def dump_state(self) -> dict[str, Any]:
        """Return what a saved program keeps. Raises TypeError for a model that was given loaded."""
        if isinstance(self._model, treadle.Model):
            raise TypeError("a treadle.Model cannot be saved with a program: give its path")
        path = None if self._model is None else os.fspath(self._model)
        return {
            "model": path,
            "load_options": self._load_options,
            "answer_options": self._answer_options,
        }

    @classmethod
    def load_state(cls, state: Mapping[str, Any]) -> TreadleEngine:
        """Return the engine of ``dump_state``."""
        return cls(**state)


class AsyncTreadleEngine:
    """Answers requests of tasks; steps of the model run in threads, so the event loop stays free.
    A cancelled task ends its answer.
    """

    def __init__(self, engine: TreadleEngine) -> None:
        self._engine = engine

    async def _loaded(self) -> treadle.ChatCompletions:
        return await asyncio.to_thread(lambda: self._engine.completions)

    async def complete(self, request: Request) -> Response:
        """Return a whole answer."""
        with as_dspy_errors():
            loaded = await self._loaded()
            made = await loaded.acreate(**self._engine.chat_of(request))
        return response_from_openai_chat(made, model=request.model)

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        """Yield an answer as events."""
        events = EventWriter(request)
        with as_dspy_errors():
            yield events.start()
            loaded = await self._loaded()
            async for chunk in loaded.astream(**self._engine.chat_of(request)):
                for event in events.of(chunk):
                    yield event

    async def aclose(self) -> None:
        """Let the model go."""
        self._engine.close()

    def dump_state(self) -> dict[str, Any]:
        """See ``TreadleEngine.dump_state``."""
        return self._engine.dump_state()

    @classmethod
    def load_state(cls, state: Mapping[str, Any]) -> AsyncTreadleEngine:
        """Return the engine of ``dump_state``; the model is shared with the other engine."""
        return cls(TreadleEngine.load_state(state))


class EventWriter:
    """Turns the chunks of an answer into DSPy's events. Each kind of text, and each call, is a part
    with a number.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._numbers: dict[Any, int] = {}

    def start(self) -> StreamStartEvent:
        """Return the first event."""
        return StreamStartEvent(model=self._request.model)

    def of(self, chunk: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield the events of a chunk."""
        choice = chunk["choices"][0]
        delta = choice["delta"]
        if text := delta.get("reasoning_content"):
            yield StreamDeltaEvent(ThinkingDelta(text, self._number("thinking")))
        if text := delta.get("content"):
            yield StreamDeltaEvent(TextDelta(text, self._number("text")))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            number = self._number(call["index"])
            made = ToolCallDelta(
                function.get("arguments", ""), number, call.get("id"), function.get("name")
            )
            yield StreamDeltaEvent(made)
        if (reason := choice["finish_reason"]) is not None:
            usage = chunk["usage"]
            yield StreamEndEvent(
                finish_reason=REASONS.get(reason, reason),
                usage=Usage(
                    input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"]
                ),
            )

    def _number(self, part: object) -> int:
        return self._numbers.setdefault(part, len(self._numbers))


@contextmanager
def as_dspy_errors() -> Iterator[None]:
    """Raise treadle's errors about a request as DSPy's."""
    try:
        yield
    except treadle.ContextFullError as error:
        raise ContextLengthError(str(error)) from error
    except (treadle.GrammarError, treadle.SamplingError, treadle.TemplateError, TypeError) as error:
        raise InvalidRequestError(str(error)) from error
