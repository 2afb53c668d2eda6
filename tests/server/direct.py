"""The app, called in the test's own thread: for tests of so many requests that Starlette's client,
which hands every piece of an answer from thread to thread, would take most of their time.
"""

from __future__ import annotations

import asyncio
import json as codec
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from starlette.applications import Starlette


@dataclass
class Answer:
    """What tests ask of an answer."""

    status_code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return codec.loads(self.body)


class DirectClient:
    """Posts one request after the other, in an event loop of its own."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self.life = app.router.lifespan_context(app)

    def __enter__(self) -> DirectClient:
        self.loop.run_until_complete(self.life.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.loop.run_until_complete(self.life.__aexit__(kind, error, trace))
        finally:
            self.loop.close()

    def post(self, path: str, *, json: Any) -> Answer:
        return self.loop.run_until_complete(self._post(path, codec.dumps(json).encode()))

    async def _post(self, path: str, body: bytes) -> Answer:
        answer, over = Answer(), asyncio.Event()
        asked = iter([{"type": "http.request", "body": body}])
        headers = {"host": "localhost", "content-type": "application/json"}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("testclient", 50000),
            "server": ("localhost", 80),
            "state": {},
        }

        async def receive() -> Any:
            for message in asked:
                return message
            await over.wait()  # the connection stays open
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status_code = message["status"]
                answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            elif message["type"] == "http.response.body":
                answer.body += message.get("body", b"")
                if not message.get("more_body"):
                    over.set()

        await self.app(scope, receive, send)
        assert over.is_set(), "the app has not ended its answer"
        return answer
