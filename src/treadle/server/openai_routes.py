"""OpenAI's endpoints by path. Nothing here imports a web framework: ``treadle.openai`` calls these
endpoints in process, and ``app.py`` serves them over HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from treadle.server.protocols import embeddings, models
from treadle.server.protocols.openai import (
    chat,
    chat_endpoint,
    completions,
    end_reasoning,
    response_lookup,
    responses,
    responses_endpoint,
)
from treadle.server.protocols.openai.answer import counter

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.server.http.http_io import Response

    Handler = Callable[[HttpRequest], Awaitable[Response]]

OPENAI_POST: Mapping[str, Handler] = {
    "/v1/chat/completions": chat_endpoint.chat_completions,
    "/v1/chat/completions/control": end_reasoning.control,
    "/v1/completions": completions.completions,
    "/v1/embeddings": embeddings.embeddings,
    "/v1/chat/completions/input_tokens": counter(chat.read_chat),
    "/v1/completions/input_tokens": counter(completions.read_completion),
    "/v1/responses": responses_endpoint.responses,
    "/v1/responses/input_tokens": counter(responses.read_response),
    "/v1/responses/{id}/cancel": response_lookup.cancel,
}
OPENAI_GET: Mapping[str, Handler] = {
    "/v1/models": models.models,
    "/v1/models/{name:path}": models.one_model,
    "/v1/responses/{id}": response_lookup.show,
    "/v1/responses/{id}/input_items": response_lookup.input_items,
}
OPENAI_DELETE: Mapping[str, Handler] = {"/v1/responses/{id}": response_lookup.delete}
