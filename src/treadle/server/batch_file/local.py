"""Answers lines with a model in this process; request bodies are read as the server reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from treadle.errors import TreadleError
from treadle.server.batch_file.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    InputLine,
    LineJob,
    answered,
    failed,
    read_job,
)
from treadle.server.batch_file.work import OutputLine
from treadle.server.http.api_errors import ApiError, problem_of
from treadle.server.protocols.embeddings import embeddings_answer
from treadle.server.protocols.openai.chat import chat_answer, read_chat
from treadle.server.protocols.openai.completions import completion_answer, read_completion
from treadle.server.protocols.openai.echo import measure_prompts
from treadle.server.requests.generation_request import SYNONYMS
from treadle.server.requests.http_responses import read_to_end
from treadle.server.requests.service import Service

PATIENCE_S = 0.2  # before a line that found no room is retried
OVERLOADED = 503


async def _chat(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    stream = await service.start(read_chat, body)
    return chat_answer(service, stream, await read_to_end(stream))


async def _completions(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    stream = await service.start(read_completion, body)
    await measure_prompts(service, stream)
    return completion_answer(service, stream, await read_to_end(stream))


ANSWERS: dict[str, Callable[[Service, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    CHAT: _chat,
    COMPLETIONS: _completions,
    EMBEDDINGS: embeddings_answer,
}


class LocalAnswers:
    """Answers lines with the model of ``service``, in this process. ``defaults``: values of fields
    that a body lacks.
    """

    def __init__(self, service: Service, defaults: Mapping[str, Any]) -> None:
        self.service, self.defaults = service, dict(defaults)
        self._n_in_hand = 0

    async def ready(self) -> None:
        """Start the engine thread, and wait until the plans are compiled. Raises the error that
        makes the model unusable.
        """
        self.service.engine.start()
        await asyncio.wrap_future(self.service.engine.warmed)

    async def answer(self, line: InputLine) -> OutputLine:
        """Return the output line for an input line: an answer, or an error. Raises TreadleError if
        the model can no longer be used.
        """
        job: LineJob | None = None
        self._n_in_hand += 1
        most = self.service.bodies.most
        try:
            job = (
                await asyncio.to_thread(read_job, line, most)
                if len(line.raw) > 1 << 16
                else read_job(line, most)
            )
            body = await self._answer(job.url, self._with_defaults(job.body))
        except Exception as error:
            if self.service.engine.state == "error":
                raise TreadleError(self.service.engine.why) from error
            return OutputLine(failed(line, job, problem_of(error)), failed=True)
        finally:
            self._n_in_hand -= 1
        return OutputLine(answered(line, job, body), body["usage"].get("completion_tokens", 0))

    async def _answer(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                return await ANSWERS[url](self.service, body)
            except ApiError as error:
                if error.status != OVERLOADED or self._n_in_hand == 1:
                    raise
            await asyncio.sleep(PATIENCE_S)  # other lines end and make room

    def _with_defaults(self, body: dict[str, Any]) -> dict[str, Any]:
        given = {name for name, value in body.items() if value is not None}
        own = {SYNONYMS.get(name, name) for name in given}
        return body | {name: value for name, value in self.defaults.items() if name not in own}
