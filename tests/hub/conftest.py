"""The environment of a process that asks a stand-in for the hub."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hub.fake_hub import Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the stand-in."""
    Hub.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "http", "HTTP"))}
    try:
        yield kept | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TREADLE_CACHE": str(tmp_path / "treadle"),
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
