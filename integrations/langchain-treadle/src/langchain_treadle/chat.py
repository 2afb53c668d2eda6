"""``ChatTreadle``: a chat model of LangChain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

import treadle
from langchain_treadle.messages import chunk_of, generation_of, openai_messages
from langchain_treadle.settings import AnswerSettings

Method = Literal["json_schema", "function_calling", "json_mode"]


class ChatTreadle(AnswerSettings, BaseChatModel):
    """A chat model of treadle, in this process.

    ``model``: a path, a name such as ``hf:OWNER/REPO:Q4_K_M``, a ``treadle.Model``, or None for the
    small model inside treadle. Fields are those of OpenAI's chat API; other settings of treadle,
    for answers and for the load, may be given by name too.

        ChatTreadle(model="model.gguf", temperature=0, repeat_penalty=1.1, context=8192)

    Answers that run at once, by threads or tasks, share batches.
    """

    reasoning_effort: str | None = None
    """"none", "minimal", "low", "medium" or "high", for models that reason."""
    logprobs: bool | None = None
    """Whether answers have log-probabilities, in ``response_metadata``."""
    top_logprobs: int | None = None
    streaming: bool = False
    """Whether ``invoke`` streams."""

    @cached_property
    def completions(self) -> treadle.ChatCompletions:
        """The loaded model, as LangChain's dicts need it."""
        return treadle.ChatCompletions(self.loaded)

    @property
    def _llm_type(self) -> str:
        return "treadle-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self._settings()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_model_name"] = kwargs.get("model", self.model_name)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text."""
        return self.loaded.tokenize(text, bos=False)

    def _settings(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        own = {
            "reasoning_effort": self.reasoning_effort,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }
        return {**self.answer_settings(stop), **own, **kwargs}

    # -- answers ------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        settings = self._settings(stop, **kwargs)
        made = self.completions.create(openai_messages(messages), **settings)
        return _result(made)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        settings = self._settings(stop, **kwargs)
        made = await self.completions.acreate(openai_messages(messages), **settings)
        return _result(made)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        settings = self._settings(stop, **kwargs)
        for piece in self.completions.stream(openai_messages(messages), **settings):
            chunk = chunk_of(piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        settings = self._settings(stop, **kwargs)
        async for piece in self.completions.astream(openai_messages(messages), **settings):
            chunk = chunk_of(piece)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    # -- tools and structured data ------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools. A grammar holds the arguments to each tool's schema.

        ``tool_choice``: "auto", "any" (or "required", True) to force a call, "none", a tool's name,
        or OpenAI's object; ``strict``: refuse schemas of which a part cannot be enforced;
        ``parallel_tool_calls``: False for one call an answer.
        """
        given = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        converted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        return self.bind(tools=converted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answer with data of a schema: a class of pydantic, a TypedDict, or a JSON schema.

        ``method``: "json_schema" constrains the answer by a grammar, so that it is always valid
        unless ``max_tokens`` cuts it; "function_calling" makes the model call a tool of this
        schema; "json_mode" allows any JSON object, so the prompt must describe it.
        ``include_raw``: also return the message and the error of parsing.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if kwargs:
            raise ValueError(f"with_structured_output: no settings {', '.join(kwargs)}")
        described = convert_to_json_schema(schema)
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            inner = {"name": described.get("title", "answer"), "schema": described}
            form = {"type": "json_schema", "json_schema": {**inner, "strict": strict}}
        elif method != "json_mode":
            raise ValueError(
                f"method={method!r}: expected json_schema, function_calling or json_mode"
            )
        bound = self.bind(
            response_format=form,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": described},
        )
        parser: OutputParserLike[Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return bound | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=bound) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )


def _result(completion: dict[str, Any]) -> ChatResult:
    usage = {"token_usage": completion["usage"], "model_name": completion["model"]}
    return ChatResult(generations=[generation_of(completion)], llm_output=usage)
