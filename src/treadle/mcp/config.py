"""The file that names MCP servers: ``{"mcpServers": {NAME: {...}}}``, as other programs have it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError

MAX_FILE = 1 << 20  # bytes
MAX_SERVERS = 64
ROOT = "mcpServers"
STDIO = ("command", "args", "env", "cwd")
HTTP = ("url", "headers")
SWITCHES = ("type", "disabled")
# Settings of other programs for the user's consent and their own screens; treadle asks itself.
FOREIGN = ("alwaysAllow", "autoApprove", "description", "timeout")
TYPES = {"stdio": STDIO, "http": HTTP, "streamable-http": HTTP, "streamableHttp": HTTP}
# Of this process's environment, a server gets these, and what the file gives.
PASSED = ("PATH", "HOME", "SYSTEMROOT", "USERPROFILE", "PATHEXT", "TEMP", "APPDATA", "LOCALAPPDATA")


@dataclass(frozen=True)
class ToolServerConfig:
    """One server of the file: a program (``command``) with ``args``, ``env`` and working directory
    ``cwd`` (None: this process's), or an address (``url``) with HTTP ``headers``.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the server's process."""
        kept = {name: os.environ[name] for name in PASSED if name in os.environ}
        return {**kept, **self.env}


@dataclass(frozen=True)
class ToolBounds:
    """Limits for MCP servers. start_s: seconds for a server to start and list its tools. call_s:
    seconds for one call. characters: longer results are cut. message_bytes: a server that sends a
    longer message is stopped. rounds: most answers of the model, with tool calls between them, to
    one request.
    """

    start_s: float = 30.0
    call_s: float = 60.0
    characters: int = 32_768
    message_bytes: int = 4 << 20
    rounds: int = 10


def read_config(path: Path) -> list[ToolServerConfig]:
    """Return the enabled servers of the file ``path``. Raises FileError, which names the place in
    the file.
    """
    try:
        with path.open("rb") as file:
            octets = file.read(MAX_FILE + 1)
        if len(octets) > MAX_FILE:
            raise FileError(f"more than {MAX_FILE} bytes", path=path, expected="a file of servers")
        value = json.loads(octets)
    except OSError as error:
        raise FileError(error.strerror or str(error), path=path) from error
    except ValueError as error:
        raise FileError(f"no JSON: {error}", path=path, expected=f'{{"{ROOT}": ...}}') from error
    if not isinstance(value, dict) or not isinstance(value.get(ROOT), dict):
        raise FileError(f'no object "{ROOT}"', path=path, expected=f'{{"{ROOT}": {{NAME: ...}}}}')
    servers = value[ROOT]
    if len(servers) > MAX_SERVERS:
        raise FileError(f"{len(servers)} servers", path=path, expected=f"at most {MAX_SERVERS}")
    made = (_read_server(path, name, each) for name, each in servers.items())
    return [each for each in made if each is not None]


def _read_server(path: Path, name: str, given: Any) -> ToolServerConfig | None:
    """Return the server ``name`` of the file ``path``, None if it is disabled. ``given``: its JSON
    value. Raises FileError.
    """
    where = f"{ROOT}.{name}"

    def wrong(found: str, expected: str) -> FileError:
        return FileError(f"{where}: {found}", path=path, expected=expected)

    if not name.strip():
        raise wrong("an empty name", "a name")
    if not isinstance(given, dict):
        raise wrong(f"{type(given).__name__}", "an object with command or url")
    if not isinstance(given.get("disabled", False), bool):
        raise wrong("disabled", "true or false")
    if given.get("disabled"):
        return None
    kind = given.get("type", "http" if "url" in given else "stdio")
    if not isinstance(kind, str) or kind not in TYPES:
        raise wrong(f"type {kind!r:.40} is not supported", "stdio or http (streamable)")
    known = TYPES[kind]
    for key in given:
        if key not in (*known, *SWITCHES, *FOREIGN):
            from difflib import get_close_matches

            near = get_close_matches(key, (*known, *SWITCHES), n=1)
            other = key in (*STDIO, *HTTP)  # as with both command and url
            meant = f"; did you mean {near[0]}?" if near else f", which {kind} has not" * other
            raise wrong(f"unknown key {key!r:.80}{meant}", ", ".join(known))
    main = known[0]
    if not isinstance(given.get(main), str) or not given[main].strip():
        raise wrong(f"no {main}", f"a text {main}")
    if known is HTTP:
        if not given["url"].startswith(("http://", "https://")):
            raise wrong(f"url {given['url']!r:.80}", "http://... or https://...")
        return ToolServerConfig(name, url=given["url"], headers=_texts(wrong, given, "headers"))
    args = given.get("args", [])
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise wrong("args", "a list of texts")
    if not isinstance(given.get("cwd", ""), str):
        raise wrong("cwd", "a folder")
    env = _texts(wrong, given, "env")
    return ToolServerConfig(name, given["command"], tuple(args), env, given.get("cwd"))


def _texts(wrong: Any, given: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the object ``given[key]``, {} if it is missing. Its values must be strings, else the
    error that ``wrong(found, expected)`` makes is raised, a FileError.
    """
    value = given.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise wrong(key, "an object of texts")
    return dict(value)
