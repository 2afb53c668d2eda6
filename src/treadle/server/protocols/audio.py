"""OpenAI's audio endpoints on a server whose model transcribes no sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from treadle.server.http.api_errors import ApiError
from treadle.server.requests.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def refuse(request: HttpRequest) -> NoReturn:
    """``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: refused (400). The server
    of a speech model answers them (``speech/transcriptions.py``).
    """
    raise ApiError(
        400,
        f"{request.url.path}: {service_of(request).name} does not transcribe sound: serve a speech "
        "model (Whisper)",
        param="model",
        code="wrong_model",
    )
