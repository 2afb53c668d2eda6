"""A server that only lists models, and an agent that only records what it is given."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Records arguments and environment in the file that RECORD names, then does what DO says.
PROGRAM = """#!{python} -IS
import json, os, pathlib, signal, sys, time
record = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "umask": os.umask(0)}}
pathlib.Path(os.environ["RECORD"]).write_text(json.dumps(record))
{do}
"""


def install_agent(folder: Path, name: str, do: str = "sys.exit(7)") -> Path:
    """Write an executable agent, which runs the Python ``do`` after it has made its record."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(PROGRAM.format(python=sys.executable, do=do))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def listed(name: str, owner: str = "treadle", **more: Any) -> dict[str, Any]:
    """A model as ``/v1/models`` has it."""
    kinds = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    return {"id": name, "owned_by": owner, "architecture": kinds, "meta": {"n_ctx": 40960}, **more}


@contextmanager
def lists(*models: dict[str, Any], key: str | None = None) -> Iterator[str]:
    """The address of a server with these models; with ``key`` it wants that one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fine = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            body = json.dumps({"object": "list", "data": models}).encode()
            self.send_response(200 if fine else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
