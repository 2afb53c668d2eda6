"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, OpenAI's."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.server.http.api_errors import ApiError, GoneError, problem_of, timed_out
from treadle.server.http.api_keys import charge_tokens
from treadle.server.http.http_io import (
    Json,
    Response,
    event,
    read_body,
    seconds_of,
    watched,
)
from treadle.server.http.multipart import read_form
from treadle.server.requests.http_responses import PING, PING_S, STREAM_HEADERS
from treadle.server.speech.speech_service import SpeechService
from treadle.server.speech.speech_thread import SpeechJob
from treadle.server.speech.transcription_request import (
    PLACE,
    TranscriptionRequest,
    check_language,
    read_request,
)
from treadle.speech.transcript_formats import formatted, verbose

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from treadle.speech.transcript import Transcript, TranscriptSegment

TYPES = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


async def transcriptions(request: HttpRequest) -> Response:
    """``POST /v1/audio/transcriptions``: text in the spoken language."""
    return await _answer(request, "transcribe")


async def translations(request: HttpRequest) -> Response:
    """``POST /v1/audio/translations``: text in English."""
    return await _answer(request, "translate")


def service_of(request: HttpRequest) -> SpeechService:
    """Return the SpeechService that answers an HTTP request."""
    service: SpeechService = request.app.state.service
    return service


async def _answer(request: HttpRequest, task: str) -> Response:
    service = service_of(request)
    service.check_ready()
    seconds = seconds_of(request)
    with service.bodies.weighing() as weigh:
        raw = await read_body(request, weigh, service.bodies.most)
        form = read_form(request.headers.get("content-type", ""), raw)
        asked = read_request(form, task)
        check_language(asked.settings, service.recognizer.model.config)
        # A compressed file is copied, and its decoder is started.
        transcription = await asyncio.to_thread(_opened, service, asked)
    service.check_ready()
    job = service.engine.add(transcription)
    end = request.scope["treadle.came"] + seconds
    stream = JobStream(service, job, end, seconds)
    if asked.is_streamed:
        return StreamedTranscript(stream, asked)
    async with watched(request.receive, lambda: stream.abort(GoneError())):
        async for _ in stream.segments():
            pass
    return _whole(job.transcription.result(), asked)


def _opened(service: SpeechService, asked: TranscriptionRequest) -> Any:
    try:
        sound = bytes(asked.sound)
        return service.recognizer.run(sound, asked.settings, service.limits, PLACE)
    except (FileError, UnsupportedError) as error:
        raise _wrong_sound(error) from None


def _wrong_sound(error: TreadleError) -> ApiError:
    """Return the error (400) for a sound that cannot be read: the client's fault."""
    return ApiError(400, str(error), param=PLACE)


class JobStream:
    """The segments of a job as they come. ``end``: the time limit, by ``perf_counter``;
    ``within_s``: its length in seconds, for the error. The iteration raises an error at the limit,
    and if the client leaves.
    """

    def __init__(self, service: SpeechService, job: SpeechJob, end: float, within_s: float) -> None:
        self._service = service
        self._job = job
        self._end = end
        self._within_s = within_s
        self._charge = charge_tokens.get()

    @property
    def transcription(self) -> Any:
        """The job's ``Transcription``."""
        return self._job.transcription

    def abort(self, why: BaseException) -> None:
        """Cancel the job: the iteration raises ``why``."""
        self._job.error = self._job.error or why
        self._job.ended = True
        self._service.engine.drop(self._job)
        self._job.news.set()

    async def segments(self, ping_s: float = math.inf) -> AsyncIterator[TranscriptSegment | None]:
        """Yield segments; None after each ``ping_s`` seconds without one. Raises ApiError for a
        sound that cannot be read and at the time limit, GoneError if the client leaves, and any
        other error that ended the job.
        """
        job = self._job
        n = 0
        try:
            while True:
                job.news.clear()
                while n < len(job.segments):
                    n += 1
                    yield job.segments[n - 1]
                if job.ended:
                    break
                left = self._end - time.perf_counter()
                patience = min(ping_s, left)
                try:
                    await asyncio.wait_for(
                        job.news.wait(), None if patience == math.inf else max(0.0, patience)
                    )
                except asyncio.TimeoutError:
                    if left <= ping_s:
                        raise timed_out(self._within_s) from None
                    yield None
            if isinstance(job.error, UnsupportedError) or (
                isinstance(job.error, FileError) and job.error.path == PLACE
            ):
                raise _wrong_sound(job.error)
            if job.error is not None:
                raise job.error
        finally:
            self._service.engine.drop(job)
            self._service.note_ended(job)
            self._charge(sum(len(segment.ids) for segment in job.segments))


def _whole(transcript: Transcript, asked: TranscriptionRequest) -> Response:
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    if asked.format == "json":
        return Json({"text": transcript.text, "usage": usage})
    if asked.format == "verbose_json":
        value = verbose(transcript, segments=asked.segments, words=asked.words)
        if transcript.task == "translate":
            value["language"] = "english"
        return Json({**value, "usage": usage})
    if asked.format == "text":
        return Response(f"{transcript.text}\n".encode(), media_type=TYPES["text"])
    return Response(formatted(transcript, asked.format).encode(), media_type=TYPES[asked.format])


class StreamedTranscript(Response):
    """A transcript of ``stream`` as server-sent events: ``transcript.text.delta`` for each segment
    (with format ``verbose_json`` also ``transcript.text.segment``), and ``transcript.text.done`` at
    the end. ``asked``: the request.
    """

    def __init__(self, stream: JobStream, asked: TranscriptionRequest) -> None:
        super().__init__(None, 200, STREAM_HEADERS, "text/event-stream")
        self._stream = stream
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end, or until the client disconnects; an error becomes the last
        event.
        """
        await send(self.head)

        async def part(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with watched(receive, lambda: self._stream.abort(GoneError())):
                async for data in self._parts():
                    await part(data)
        except GoneError:
            return
        except Exception as error:
            problem = scope["treadle.problem"] = problem_of(error)
            with suppress(OSError):
                await part(event({"type": "error", **problem.as_dict()}, "error"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        begun = False
        async for segment in self._stream.segments(PING_S):
            if segment is None:
                yield PING
                continue
            said = segment.text if begun else segment.text.lstrip()
            begun = True
            yield event({"type": "transcript.text.delta", "delta": said})
            if self._asked.format == "verbose_json":
                yield event(
                    {
                        "type": "transcript.text.segment",
                        "id": f"seg_{segment.index}",
                        "start": round(segment.start, 3),
                        "end": round(segment.end, 3),
                        "text": segment.text,
                        "speaker": "",
                    }
                )
        transcript = self._stream.transcription.result()
        usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
        yield event({"type": "transcript.text.done", "text": transcript.text, "usage": usage})
