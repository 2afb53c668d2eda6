"""The process of ``treadle serve`` with several models: the server's process around the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.server.http.listeners import Listeners
from treadle.server.router.app import build_router_app
from treadle.server.router.launcher import EngineLauncher, launcher
from treadle.server.router.service import RouterService, RouterSettings
from treadle.server.serve import ServerProcess

if TYPE_CHECKING:
    from treadle.server.requests.service import ServerSettings
    from treadle.server.router.model_list import ModelList


def serve_router(
    models: ModelList,
    settings: ServerSettings,
    own: RouterSettings,
    port: int,
    grace_s: float,
    ready: Callable[[str], None],
    engines: EngineLauncher | None = None,
) -> None:
    """Serve ``models`` at ``port`` until a signal. ``own``: the router's own settings; ``grace_s``:
    seconds that running calls get after a signal; ``ready``: called with the addresses, one a line;
    ``engines``: starts engines, None for the usual launcher. Raises TreadleError if it cannot
    listen.
    """

    async def run() -> None:
        service = RouterService(models, settings, own, engines or launcher())
        try:
            await ServerProcess(service, grace_s, ready, build_router_app).run(listeners)
        finally:
            await service.end()

    listeners = Listeners(settings.hosts, port)
    try:
        asyncio.run(run())
    finally:
        listeners.close()
