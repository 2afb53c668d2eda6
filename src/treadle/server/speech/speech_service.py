"""State shared by the handlers of a speech model's server."""

from __future__ import annotations

import time
from dataclasses import field
from typing import TYPE_CHECKING

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.files.splits import shown_name
from treadle.media.limits import MediaLimits
from treadle.server.http.api_errors import busy
from treadle.server.http.api_keys import ApiKey, ApiKeyStore, TokenCharges
from treadle.server.http.http_io import MAX_SOUND_BODY, Bodies
from treadle.server.http.log import log
from treadle.server.http.redaction import hide
from treadle.server.requests.admission import check_limit, check_usable
from treadle.server.requests.service import ServerSettings
from treadle.server.speech.speech_thread import SpeechJob, SpeechThread

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer

SOUND_SECONDS = 24 * 3600


@dataclass
class SpeechService:
    """One served speech model (``recognizer``), its thread and counters. ``close`` ends the thread;
    the owner closes the model.
    """

    recognizer: SpeechRecognizer
    settings: ServerSettings = field(default_factory=ServerSettings)

    def __post_init__(self) -> None:
        path = self.recognizer.path
        own = shown_name(path).removesuffix(".gguf").removesuffix(".bin")
        self.name = self.settings.alias or own
        hide(path)
        self.created = int(time.time())
        self.fingerprint = f"treadle-{__version__}"
        self.charges = TokenCharges()  # of a router's engine
        self.keys = ApiKeyStore(self.settings.api_keys, self.settings.api_key_file, self.warn)
        self.bodies = Bodies(MAX_SOUND_BODY)
        self.limits = MediaLimits(sound_bytes=MAX_SOUND_BODY, sound_seconds=SOUND_SECONDS)
        self.engine = SpeechThread(self.recognizer.model)
        self.draining = False
        self.n_open = 0  # open HTTP requests that the shutdown waits for
        self.n_requests = 0  # transcriptions, since the start
        self.seconds_done = 0.0  # of sound

    def check_ready(self) -> None:
        """Raise ApiError if no request can be taken now: the server is stopping, the model is not
        usable, or there are too many requests.
        """
        if self.draining:
            raise busy("the server is stopping")
        self.check_model()
        check_limit(len(self.engine.outputs), self.settings.max_requests)

    def check_model(self) -> None:
        """Raise ApiError if the model is being loaded, or can no longer be used."""
        check_usable(self.engine)

    def check_key(self, key: ApiKey) -> None:
        """Raise ApiError (403) if the key may not use this server's model."""
        key.check(self.name)

    def note_ended(self, job: SpeechJob) -> None:
        """Count the transcription of ``job``, which has ended, and its seconds of sound."""
        self.n_requests += 1
        self.seconds_done += job.transcription.seconds_done

    def warn(self, message: str) -> None:
        """Write a warning to the log."""
        if self.settings.log:
            log(level="warning", message=message)

    def stop_streams(self) -> None:
        """Abort the unfinished transcriptions: the server is stopping."""
        for job in [*self.engine.outputs]:
            job.error = busy("the server is stopping")
            job.ended = True
            self.engine.drop(job)
            job.notify()

    def close(self) -> None:
        """End the thread."""
        self.engine.stop()
