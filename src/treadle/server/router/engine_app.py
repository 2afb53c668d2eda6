"""The ASGI application of an engine: that of the one-model server, and one path more for its
router.
"""

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
    """Build the ASGI application of an engine with a text model."""
    return with_charges(build_app(service))


def build_speech_engine_app(service: SpeechService) -> Starlette:
    """Build the ASGI application of an engine with a speech model."""
    from treadle.server.speech.speech_app import build_speech_app

    return with_charges(build_speech_app(service))


def with_charges(app: Starlette) -> Starlette:
    """Add the path ``CHARGES``, which only the router asks for, to an application."""
    app.router.routes.insert(0, Route(CHARGES, charges, methods=["GET"]))
    return app


async def charges(request: HttpRequest) -> Json:
    """``GET`` of ``CHARGES``: numbers of tokens computed since the last call, by name of the API
    key.
    """
    return Json(service_of(request).charges.take())
