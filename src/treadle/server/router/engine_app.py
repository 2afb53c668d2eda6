"""The application of an engine: that of the one-model server, and what its router asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from treadle.server.app import build_app
from treadle.server.http.api_keys import CHARGES
from treadle.server.http.http_io import Json
from treadle.server.requests.service import service_of

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest

    from treadle.server.requests.service import Service
    from treadle.server.speech.speech_service import SpeechService


def build_engine_app(service: Service) -> Starlette:
    """Build the ASGI application of an engine."""
    return with_charges(build_app(service))


def build_speech_engine_app(service: SpeechService) -> Starlette:
    """Build the ASGI application of a speech model's engine."""
    from treadle.server.speech.speech_app import build_speech_app

    return with_charges(build_speech_app(service))


def with_charges(app: Starlette) -> Starlette:
    """Add to an application what only its router asks."""
    app.router.routes.insert(0, Route(CHARGES, charges, methods=["GET"]))
    return app


async def charges(request: HttpRequest) -> Json:
    """The tokens that were computed for each key since the last time."""
    return Json(service_of(request).charges.take())
