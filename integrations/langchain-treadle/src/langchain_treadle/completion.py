"""``TreadleLLM``: a model that continues a text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from langchain_core.outputs import GenerationChunk

from langchain_treadle.settings import AnswerSettings


class TreadleLLM(AnswerSettings, LLM):
    """A model of treadle that continues a text, without a chat template; for base models.

    Settings are those of ``treadle.Model.generate``, such as ``max_tokens=64`` or
    ``regex="[0-9]+"``. For chat models use ``ChatTreadle``.
    """

    @property
    def _llm_type(self) -> str:
        return "treadle"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self.answer_settings()}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text."""
        return self.loaded.tokenize(text, bos=False)

    def _given(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        settings = self.answer_settings(stop, **kwargs)
        return {name: value for name, value in settings.items() if value is not None}

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return self.loaded.generate(prompt, **self._given(stop, kwargs)).finish()

    async def _acall(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return await self.loaded.generate(prompt, **self._given(stop, kwargs)).afinish()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in self.loaded.generate(prompt, **self._given(stop, kwargs)):
            chunk = GenerationChunk(text=piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async for piece in self.loaded.generate(prompt, **self._given(stop, kwargs)):
            chunk = GenerationChunk(text=piece)
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
