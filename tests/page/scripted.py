"""A server whose answers are written by the test: the real page, and a model that says what it is
told to.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treadle.sampling import Sampling
from treadle.server.protocols.llamacpp_answer import sampling_dict
from treadle.server.static import page_routes

CUT = object()  # in an answer: the connection is lost here
N_CTX = 4096


def says(text: str = "", finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """One chunk of a chat."""
    said = {"content": text, **delta} if text else delta
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def end(finish: str = "stop", n: int = 2) -> dict[str, Any]:
    """The last chunk, with what the answer cost."""
    cost = {"cache_n": 30, "prompt_n": 12, "prompt_ms": 10.0, "prompt_per_second": 1200.0}
    cost |= {"predicted_n": n, "predicted_ms": 100.0, "predicted_per_second": 31.5}
    return says(finish=finish) | {"timings": cost}


class Scripted:
    """``answers`` are taken one a request: lists of chunks, of ``threading.Event`` to wait for, and
    of ``CUT``; or (status, error). ``bodies`` are what was asked, ``left`` counts the clients that
    went before the end.
    """

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.left = 0
        self.tools: dict[str, Any] = {"data": [], "servers": []}  # of MCP servers
        self.results: dict[str, str] = {}  # of their calls, by name
        self.props: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": N_CTX, "params": sampling_dict(Sampling())},
            "model_alias": "scripted",
            "treadle": {"builtin_template": None},
        }
        self.key = ""
        self.models: list[dict[str, Any]] = []  # of a server with several: as /v1/models has them
        self.props_of: dict[str, dict[str, Any]] = {}  # of those that are loaded, by their names
        self.hold_loads = threading.Event()  # while it is set, no load ends
        self.broken: set[str] = set()  # models that cannot be loaded
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        routes = [Route(path, self._answer, methods=["POST"]) for path in PATHS]
        routes += [Route("/health", self._health), Route("/props", self._props)]
        routes += [Route("/v1/models", self._models), Route("/models/sse", self._changes)]
        routes += [Route(f"/models/{each}", self._change, methods=["POST"]) for each in CHANGES]
        routes += [
            Route("/v1/mcp/tools", self._list_tools),
            Route("/v1/mcp/call", self._call_tool, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=[*page_routes(), *routes]),
            port=0,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._socket = config.bind_socket()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _props(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if not self.models:
            return JSONResponse(self.props)
        if (name := request.query_params.get("model")) is None:
            return JSONResponse({"role": "router", "treadle": {"max_body_bytes": 1 << 24}})
        if name not in self.props_of:
            if request.query_params.get("autoload") == "false":
                return JSONResponse({"error": {"code": "model_not_loaded", "message": name}}, 400)
            if name in self.broken:
                return JSONResponse({"error": {"message": f"{name} cannot be loaded"}}, 500)
            await self._load(name)
        return JSONResponse({**self.props, "model_alias": name, **self.props_of[name]})

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"data": self.models})

    async def _changes(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            while not self._server.should_exit:
                yield b": ping\n\n"
                while not self.events.empty():
                    yield b"data: " + json.dumps(self.events.get()).encode() + b"\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _change(self, request: Request) -> Response:
        name = (await request.json())["model"]
        self.paths.append(f"{request.url.path} {name}")
        if request.url.path.endswith("unload"):
            self.props_of.pop(name, None)
            self.note(name, "unloaded")
        else:
            await self._load(name)
        return JSONResponse({"success": True})

    async def _load(self, name: str) -> None:
        self.note(name, "loading", {"stages": ["compile"], "current": "compile", "value": 0.4})
        while self.hold_loads.is_set():
            await asyncio.sleep(0.01)
        self.props_of[name] = {}
        self.note(name, "loaded")

    def note(self, name: str, status: str, progress: Any = None) -> None:
        """Change a model's state, and tell the page."""
        for model in self.models:
            if model["id"] == name:
                model["status"] = {"value": status, "progress": progress}
        data = {"status": status, "progress": progress}
        self.events.put({"model": name, "event": "model_status", "data": data})

    async def _list_tools(self, request: Request) -> Response:
        return JSONResponse(self.tools)

    async def _call_tool(self, request: Request) -> Response:
        body = await request.json()
        self.paths.append(f"{body['name']} {body['arguments']}")
        if body["name"] not in self.results:
            return JSONResponse({"error": {"message": "no such tool"}}, 404)
        return JSONResponse({"output": self.results[body["name"]], "is_error": False})

    def _refusal(self, request: Request) -> Response | None:
        self.keys.append(request.headers.get("authorization", ""))
        if self.keys[-1] == f"Bearer {self.key}" or not self.key:
            return None
        return JSONResponse({"error": {"message": "no", "code": "invalid_api_key"}}, 401)

    async def _answer(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        self.bodies.append(await request.json())
        self.paths.append(request.url.path)
        if request.url.path == CONTROL:
            return JSONResponse({"success": True})
        answer = self.answers.popleft()
        if isinstance(answer, tuple):
            status, error = answer
            return JSONResponse({"error": error}, status)
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, answer: list[Any]) -> AsyncIterator[bytes]:
        whole = False
        try:
            for part in answer:
                if isinstance(part, threading.Event):
                    while not part.is_set():
                        yield b": ping\n\n"
                        await asyncio.sleep(0.01)
                elif part is CUT:
                    raise ConnectionError
                else:
                    yield b"data: " + json.dumps(part).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            whole = True
        except ConnectionError:
            whole = True
        finally:
            self.left += not whole


CONTROL = "/v1/chat/completions/control"
CHANGES = ("load", "unload")
PATHS = ("/v1/chat/completions", CONTROL, "/completion")
