"""``TreadleHandler``: answers LiteLLM's calls with models of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from litellm.exceptions import (
    BadRequestError,
    ContextWindowExceededError,
    NotFoundError,
    RateLimitError,
)
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import EmbeddingResponse, GenericStreamingChunk, ModelResponse, Usage
from litellm.types.utils import ModelResponseStream as StreamChunk

import treadle

# Settings of LiteLLM's own, for connections.
REMOTE = frozenset(("extra_headers", "extra_query", "max_retries", "headers", "num_retries"))


class TreadleHandler(CustomLLM):
    """Handler of a provider, see ``register``. A model is loaded at its first call, and stays until
    the handler goes.
    """

    def __init__(
        self,
        models: Mapping[str, treadle.Model | str | os.PathLike[str]] | None = None,
        **load_options: Any,
    ) -> None:
        super().__init__()
        self._paths = dict(models or {})
        self._load_options = load_options
        self._loaded: dict[str, treadle.ChatCompletions] = {}
        self._lock = threading.Lock()

    def completions(self, name: str) -> treadle.ChatCompletions:
        """Return the model of a name. Raises LiteLLM's NotFoundError if there is none."""
        with self._lock:
            if name not in self._loaded:
                given = self._paths.get(name, name)
                options = {} if isinstance(given, treadle.Model) else self._load_options
                try:
                    model = treadle.load_shared(given, **options)
                except treadle.FileError as error:
                    raise NotFoundError(str(error), name, "treadle") from error
                self._loaded[name] = treadle.ChatCompletions(model)
            return self._loaded[name]

    # -- chats --------------------------------------------------------------------------------

    def completion(  # type: ignore[override]  # only what is used of LiteLLM's arguments
        self, *, model: str, messages: Sequence[Mapping[str, Any]], **call: Any
    ) -> ModelResponse:
        """Return a whole answer."""
        with as_litellm_errors(model):
            made = self.completions(model).create(messages, **fields_of(call))
        return filled(call["model_response"], made)

    async def acompletion(  # type: ignore[override]
        self, *, model: str, messages: Sequence[Mapping[str, Any]], **call: Any
    ) -> ModelResponse:
        """Do what ``completion`` does; the event loop stays free."""
        with as_litellm_errors(model):
            loaded = await asyncio.to_thread(self.completions, model)
            made = await loaded.acreate(messages, **fields_of(call))
        return filled(call["model_response"], made)

    def streaming(  # type: ignore[override]
        self, *, model: str, messages: Sequence[Mapping[str, Any]], **call: Any
    ) -> Iterator[Any]:
        """Yield an answer in pieces."""
        with as_litellm_errors(model):
            for chunk in self.completions(model).stream(messages, **fields_of(call)):
                yield chunk_of(chunk)

    async def astreaming(  # type: ignore[override]
        self, *, model: str, messages: Sequence[Mapping[str, Any]], **call: Any
    ) -> AsyncIterator[Any]:
        """Do what ``streaming`` does; the event loop stays free."""
        with as_litellm_errors(model):
            loaded = await asyncio.to_thread(self.completions, model)
            async for chunk in loaded.astream(messages, **fields_of(call)):
                yield chunk_of(chunk)

    # -- vectors ------------------------------------------------------------------------------

    def embedding(  # type: ignore[override]
        self, *, model: str, input: str | Sequence[Any], **call: Any
    ) -> EmbeddingResponse:
        """Return a vector for each text, or list of token ids."""
        texts = [input] if isinstance(input, str) or is_ids(input) else list(input)
        given = fields_of(call)
        with as_litellm_errors(model):
            loaded = self.completions(model).model
            ids = [loaded.tokenize(text) if isinstance(text, str) else text for text in texts]
            vectors = loaded.embed(texts, dimensions=given.get("dimensions"))
        n_tokens = sum(map(len, ids))
        response: EmbeddingResponse = call["model_response"]
        response.object = "list"
        response.model = model
        response.data = [
            {"object": "embedding", "index": i, "embedding": vector.tolist()}
            for i, vector in enumerate(vectors)
        ]
        response.usage = Usage(prompt_tokens=n_tokens, total_tokens=n_tokens)
        return response

    async def aembedding(  # type: ignore[override]
        self, *, model: str, input: str | Sequence[Any], **call: Any
    ) -> EmbeddingResponse:
        """Do what ``embedding`` does, in a thread."""
        return await asyncio.to_thread(self.embedding, model=model, input=input, **call)


def is_ids(input: Sequence[Any]) -> bool:
    """Whether the input of an embedding is one text as token ids."""
    return bool(input) and all(isinstance(item, int) for item in input)


def fields_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of OpenAI's API of one of LiteLLM's calls."""
    given = {**call["optional_params"]}
    given |= given.pop("extra_body", None) or {}
    return {name: value for name, value in given.items() if name not in REMOTE}


def filled(response: ModelResponse, made: Mapping[str, Any]) -> ModelResponse:
    """Return LiteLLM's ``response`` with an answer in it."""
    own = ModelResponse(**made)
    response.choices = own.choices
    response.id = own.id
    response.created = own.created
    response.usage = own.usage  # type: ignore[attr-defined]  # which LiteLLM sets so itself
    return response


def chunk_of(chunk: Mapping[str, Any]) -> StreamChunk | GenericStreamingChunk:
    """Return a piece of a stream as LiteLLM's. The last one, which has the usage, is of its general
    form: LiteLLM would drop the usage of the other form.
    """
    reason = chunk["choices"][0]["finish_reason"]
    if reason is None:
        return StreamChunk(**chunk)
    return {
        "text": "",
        "is_finished": True,
        "finish_reason": reason,
        "usage": chunk["usage"],
        "index": 0,
        "tool_use": None,
    }


@contextmanager
def as_litellm_errors(model: str) -> Iterator[None]:
    """Raise treadle's errors as LiteLLM's, which retries and fallbacks know."""
    try:
        yield
    except treadle.NoRoomError as error:
        raise RateLimitError(str(error), "treadle", model) from error
    except treadle.ContextFullError as error:
        raise ContextWindowExceededError(str(error), model, "treadle") from error
    except (treadle.TreadleError, TypeError) as error:
        raise BadRequestError(str(error), model, "treadle") from error
