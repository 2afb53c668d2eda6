"""``Treadle``, an LLM of LlamaIndex."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model

import treadle
from llama_index.llms.treadle.messages import AnswerMessage, openai_messages
from treadle.api.chat_completions import usage

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


class Treadle(FunctionCallingLLM):
    """A language model of treadle, in this process.

    ``model``: a path, a name such as ``hf:OWNER/REPO:Q4_K_M``, a ``treadle.Model``, or None for the
    small model inside treadle. A path is opened at the first use, once for all objects with the
    same ``load_options`` (settings of ``treadle.load``). ``additional_kwargs``: further settings of
    answers, such as ``repeat_penalty``. Answers that run at once share batches.
    """

    model: str | None = Field(default=None, description="A path or a name.")
    temperature: float | None = Field(default=None, description="None: the model's own.")
    max_tokens: int | None = Field(default=None, description="None: until the context is full.")
    load_options: dict[str, Any] = Field(default_factory=dict)
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    is_chat_model: bool = Field(
        default=True, description="False for base models: ``complete`` continues the text itself."
    )

    _given: Any = PrivateAttr()
    _completions: treadle.ChatCompletions | None = PrivateAttr(default=None)

    def __init__(
        self, model: treadle.Model | str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        name = None if model is None else str(getattr(model, "path", model))
        super().__init__(model=name, **settings)
        self._given = model

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised objects."""
        return "Treadle"

    @property
    def completions(self) -> treadle.ChatCompletions:
        """The loaded model. Raises the errors of ``treadle.load``."""
        if self._completions is None:
            options = {} if isinstance(self._given, treadle.Model) else self.load_options
            self._completions = treadle.ChatCompletions(treadle.load_shared(self._given, **options))
        return self._completions

    @property
    def metadata(self) -> LLMMetadata:
        """The model's name and sizes; the model is loaded for it."""
        loaded = self.completions
        return LLMMetadata(
            context_window=loaded.model.n_ctx,
            num_output=self.max_tokens or -1,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_chat_model,
            model_name=loaded.name,
        )

    def _settings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {**own, **self.additional_kwargs, **kwargs}

    # -- chat ---------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return a whole answer."""
        made = self.completions.create(openai_messages(messages), **self._settings(kwargs))
        return _whole(made)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Do what ``chat`` does; the event loop stays free."""
        loaded = await asyncio.to_thread(lambda: self.completions)
        made = await loaded.acreate(openai_messages(messages), **self._settings(kwargs))
        return _whole(made)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield an answer as it is written."""

        def responses() -> ChatResponseGen:
            answer = AnswerMessage()
            settings = self._settings(kwargs)
            for chunk in self.completions.stream(openai_messages(messages), **settings):
                delta = answer.add(chunk["choices"][0]["delta"])
                yield answer.response(chunk, delta)

        return responses()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Do what ``stream_chat`` does; the event loop stays free."""
        loaded = await asyncio.to_thread(lambda: self.completions)

        async def responses() -> ChatResponseAsyncGen:
            answer = AnswerMessage()
            settings = self._settings(kwargs)
            async for chunk in loaded.astream(openai_messages(messages), **settings):
                delta = answer.add(chunk["choices"][0]["delta"])
                yield answer.response(chunk, delta)

        return responses()

    # -- completion ---------------------------------------------------------------------------

    def _generation(self, prompt: str, kwargs: dict[str, Any]) -> treadle.Generation:
        settings = {k: v for k, v in self._settings(kwargs).items() if v is not None}
        return self.completions.model.generate(prompt, **settings)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt. A base model continues it, as a chat model does with one that is
        ``formatted`` by its template.
        """
        if self.is_chat_model and not formatted:
            return chat_to_completion_decorator(self.chat)(prompt, **kwargs)
        made = self._generation(prompt, kwargs)
        return CompletionResponse(text=made.finish(), additional_kwargs=usage(made))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Do what ``complete`` does; the event loop stays free."""
        if self.is_chat_model and not formatted:
            return await achat_to_completion_decorator(self.achat)(prompt, **kwargs)
        made = await asyncio.to_thread(self._generation, prompt, kwargs)
        return CompletionResponse(text=await made.afinish(), additional_kwargs=usage(made))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Yield what ``complete`` returns as it is written."""
        if self.is_chat_model and not formatted:
            return stream_chat_to_completion_decorator(self.stream_chat)(prompt, **kwargs)

        def responses() -> CompletionResponseGen:
            made = self._generation(prompt, kwargs)
            for piece in made:
                yield CompletionResponse(text=made.text, delta=piece)

        return responses()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Do what ``stream_complete`` does; the event loop stays free."""
        if self.is_chat_model and not formatted:
            decorated = astream_chat_to_completion_decorator(self.astream_chat)
            return await decorated(prompt, **kwargs)
        made = await asyncio.to_thread(self._generation, prompt, kwargs)

        async def responses() -> CompletionResponseAsyncGen:
            async for piece in made:
                yield CompletionResponse(text=made.text, delta=piece)

        return responses()

    # -- tools and structured data ------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        given = {
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": "required" if tool_required else "auto",
            "parallel_tool_calls": allow_parallel_tool_calls,
        }
        return {"messages": messages, **given, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of an answer. Raises ValueError if there are none, and for arguments
        that were cut, unless ``error_on_no_tool_call`` is False: then their complete part counts.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"expected a tool call, found {response.message.content!r:.200}")
        made = []
        for call in calls:
            arguments = call.tool_kwargs
            if isinstance(arguments, str):
                if error_on_no_tool_call:
                    raise ValueError(f"a call of {call.tool_name} was cut: {arguments!r:.200}")
                arguments = parse_partial_json(arguments)
            made.append(
                ToolSelection(
                    tool_id=call.tool_call_id or "",
                    tool_name=call.tool_name,
                    tool_kwargs=arguments,
                )
            )
        return made

    def _structured_settings(
        self, output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {**(llm_kwargs or {}), "response_format": output_cls}

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an object of a class of pydantic. A grammar constrains the answer to its schema.
        Raises pydantic's ValidationError for an answer that ``max_tokens`` has cut.
        """
        settings = self._structured_settings(output_cls, llm_kwargs)
        response = self.chat(self._messages_of(prompt, prompt_args), **settings)
        return output_cls.model_validate_json(response.message.content or "")

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Do what ``structured_predict`` does; the event loop stays free."""
        settings = self._structured_settings(output_cls, llm_kwargs)
        response = await self.achat(self._messages_of(prompt, prompt_args), **settings)
        return output_cls.model_validate_json(response.message.content or "")

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None, None]:
        settings = self._structured_settings(output_cls, llm_kwargs)
        for response in self.stream_chat(self._messages_of(prompt, prompt_args), **settings):
            yield process_streaming_objects(response, output_cls, llm=self)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None]:
        settings = self._structured_settings(output_cls, llm_kwargs)
        responses = await self.astream_chat(self._messages_of(prompt, prompt_args), **settings)

        async def objects() -> AsyncGenerator[Any, None]:
            async for response in responses:
                yield process_streaming_objects(response, output_cls, llm=self)

        return objects()

    def _messages_of(self, prompt: PromptTemplate, values: dict[str, Any]) -> list[ChatMessage]:
        return self._extend_messages(prompt.format_messages(llm=self, **values))


def _whole(made: dict[str, Any]) -> ChatResponse:
    answer = AnswerMessage()
    answer.add(made["choices"][0]["message"])
    return answer.response(made)
