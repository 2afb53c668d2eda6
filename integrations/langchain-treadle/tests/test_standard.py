"""LangChain's own tests of integrations (``langchain-tests``).

The model is the small one inside treadle, which was not trained to chat: where a test expects an
answer that only a better model gives, a script makes it write that.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

import treadle
from langchain_treadle import ChatTreadle, TreadleEmbeddings
from shared_tests import Script, written_calls

MODEL = treadle.load(threads=2, n_sequences=2)
JOKE = json.dumps({"setup": "Where do cats sleep?", "punchline": "Anywhere."})
CALL = written_calls(MODEL, magic_function={"input": 3})
WEATHER = written_calls(MODEL, get_weather={"location": "San Francisco, CA"})
SCRIPTS = {
    "test_tool_calling": (CALL,),
    "test_tool_calling_async": (CALL,),
    "test_bind_runnables_as_tools": (
        written_calls(MODEL, greeting_generator={"answer_style": "pirate"}),
    ),
    "test_structured_output": (JOKE,),
    "test_structured_output_async": (JOKE,),
    "test_structured_output_pydantic_2_v1": (JOKE,),
    "test_structured_output_optional_param": (JOKE,),
    "test_json_mode": (JOKE,),
    "test_agent_loop": (WEATHER, "It is sunny."),
    "test_unicode_tool_call_integration": tuple(
        written_calls(MODEL, unicode_customer={"customer_name": name, "description": "new"})
        for name in ("你好啊集团", "こんにちは株式会社")
    ),
}


class _ChatTreadleTests:
    @property
    def chat_model_class(self) -> type[ChatTreadle]:
        return ChatTreadle

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # A small model repeats a call until it is cut, and the tests expect one call.
        return {"model": MODEL, "parallel_tool_calls": False}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestChatTreadleUnit(_ChatTreadleTests, ChatModelUnitTests):
    pass


class TestChatTreadle(_ChatTreadleTests, ChatModelIntegrationTests):
    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        params = {**self.standard_chat_model_params, **self.chat_model_params}
        test = request.node.originalname
        if test in SCRIPTS:
            params |= {"custom": Script(MODEL, *SCRIPTS[test]), "max_tokens": None}
        elif "tool" not in test:  # a call that is cut is none
            params["max_tokens"] = 12
        return ChatTreadle(**params, **getattr(request, "param", None) or {})

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatTreadle(model=MODEL, max_tokens=4)
        question = [HumanMessage("Tell me all that you know about rivers. " * 8)]
        model.invoke(question)
        answer: Any = None
        for chunk in model.stream(question) if stream else [model.invoke(question)]:
            answer = chunk if answer is None else answer + chunk
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 32
        return answer  # type: ignore[no-any-return]


class _TreadleEmbeddingsTests:
    @property
    def embeddings_class(self) -> type[TreadleEmbeddings]:
        return TreadleEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}


class TestTreadleEmbeddingsUnit(_TreadleEmbeddingsTests, EmbeddingsUnitTests):
    pass


class TestTreadleEmbeddings(_TreadleEmbeddingsTests, EmbeddingsIntegrationTests):
    pass
