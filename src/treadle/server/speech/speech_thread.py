"""The thread that transcribes for all requests, one window of sound of each in turn."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from treadle.errors import FileError, TreadleError
from treadle.speech.transcription import Transcription
from treadle.speech.warm import warm_model

if TYPE_CHECKING:
    from treadle.speech.model import SpeechModel
    from treadle.speech.transcript import TranscriptSegment


class SpeechJob:
    """One request's transcription. ``segments`` grows; the event ``news`` is set in the handler's
    event loop for each change. ``error``: why it ended early; ``ended``: nothing more comes.
    """

    def __init__(self, transcription: Transcription) -> None:
        self.transcription = transcription
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.segments: list[TranscriptSegment] = []
        self.error: BaseException | None = None
        self.ended = False
        self.is_cancelled = False

    def notify(self) -> None:
        """Set ``news`` in the handler's event loop; any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.news.set)


class SpeechThread:
    """Transcribes between ``start`` and ``stop``. ``state``, ``why``, ``warmed`` and ``turns`` as
    of an ``EngineThread``; ``warms_when_idle`` has no effect; ``outputs``: the jobs that are not
    done.
    """

    def __init__(self, model: SpeechModel) -> None:
        self.model = model
        self.state = "loading"
        self.why = ""
        self.warmed: Future[None] = Future()
        self.warmed.set_running_or_notify_cancel()
        self.outputs: set[SpeechJob] = set()
        self.turns: AbstractContextManager[None] = nullcontext()
        self.warms_when_idle = False
        self._queue: deque[SpeechJob] = deque()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="treadle-speech", daemon=True)

    def start(self) -> None:
        """Start the thread: it compiles all kernels, then transcribes."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after its current window, and wait for it, ``timeout_s`` seconds at most.
        Idempotent.
        """
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def add(self, transcription: Transcription) -> SpeechJob:
        """Queue a transcription and return its job. Call it in the handler's event loop."""
        job = SpeechJob(transcription)
        self.outputs.add(job)
        self._queue.append(job)
        self._work.set()
        return job

    def drop(self, job: SpeechJob) -> None:
        """Forget a job; if it is not done, it is cancelled after its current window."""
        job.is_cancelled = True
        self.outputs.discard(job)
        self._work.set()

    def _run(self) -> None:
        try:
            warm_model(self.model)
        except BaseException as error:
            self.state = "error"
            self.why = str(error)
            self.warmed.set_exception(error)
            return
        self.state = "ok"
        self.warmed.set_result(None)
        while not self._stopping:
            self._work.clear()  # before the look: later arrivals set it again
            if not self._queue:
                self._work.wait()
                continue
            job = self._queue.popleft()
            with self.turns:
                goes_on = self._step(job)
            if goes_on:
                self._queue.append(job)
        for job in self._queue:
            self._end(job, TreadleError("the server is stopping"))

    def _step(self, job: SpeechJob) -> bool:
        """Transcribe one window of the job's sound; return whether there may be another."""
        if job.is_cancelled:
            job.transcription.close()
            return False
        n = len(job.transcription.segments)
        try:
            goes_on = job.transcription.step()
        except BaseException as error:
            if not isinstance(error, TreadleError):
                traceback.print_exc()
            if isinstance(error, FileError) and error.path == str(self.model.path):
                self.state = "error"
                self.why = str(error)
            self._end(job, error)
            return False
        if not goes_on:
            self._end(job, None)
            return False
        job.segments += job.transcription.segments[n:]
        job.notify()
        return True

    def _end(self, job: SpeechJob, error: BaseException | None) -> None:
        job.transcription.close()
        job.error = error
        job.ended = True
        job.notify()
