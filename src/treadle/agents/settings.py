"""Variables, files and arguments that point an agent at a server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treadle.base.fast_classes import dataclass
from treadle.jit.cache import write_whole

NO_KEY = "treadle"  # agents refuse to start without a key; a server without keys reads none
# Tokens of an answer: agents keep so many free, and shorten a conversation before they are used.
MOST_ANSWER = 8192
HOSTS = ("127.0.0.1", "localhost", "::1")
PROXIES = ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class Endpoint:
    """A model at a server. url: of the server, without ``/v1``. model: its name. n_context: tokens
    that one request may use. api_key: None if the server wants none. sees: whether the model reads
    pictures.
    """

    url: str
    model: str
    n_context: int
    api_key: str | None = None
    sees: bool = False

    @property
    def base_url(self) -> str:
        """The address of OpenAI's endpoints."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """The API key that clients send; a placeholder if the server wants none."""
        return self.api_key or NO_KEY

    @property
    def max_answer(self) -> int:
        """The maximum tokens of one answer that an agent requests: a quarter of the context, at
        most ``MOST_ANSWER``.
        """
        return min(MOST_ANSWER, max(self.n_context // 4, 1))


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one start of an agent.

    variables: environment variables to set. removed: variables to unset, which would override
    ``variables``. arguments: placed before the user's own. files: contents by path, written before
    the agent starts.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment ``own`` with ``variables`` set and ``removed`` unset."""
        kept = {name: value for name, value in own.items() if name not in self.removed}
        return {**kept, **self.variables}

    def write_files(self) -> None:
        """Write the files, readable for this user only. Raises OSError."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())


@dataclass(frozen=True)
class Agent:
    """One agent. title: the name as its vendor writes it. executable: its program. install: the
    vendor's command to install it. settings: makes AgentSettings for an endpoint and a folder for
    files. aliases: other names that ``treadle launch`` accepts.
    """

    name: str
    title: str
    executable: str
    install: str
    settings: Callable[[Endpoint, Path], AgentSettings]
    aliases: tuple[str, ...] = ()


def past_proxy(url: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to ``url`` from a proxy: {} unless this is an address of
    this machine and the environment ``own`` sets a proxy.
    """
    host = urlsplit(url).hostname or ""
    if host not in HOSTS or not any(own.get(name) for name in PROXIES):
        return {}
    kept = own.get("NO_PROXY") or own.get("no_proxy") or ""
    if host in kept.split(",") or kept == "*":
        return {}
    hosts = ",".join(filter(None, (kept, host)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def json_text(value: Any) -> str:
    """Return ``value`` as indented JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def shell_script(agent: Agent, settings: AgentSettings, arguments: Sequence[str]) -> str:
    """Return a POSIX shell script that sets and unsets the variables of ``settings``, writes its
    files, and runs the agent with its arguments and then the user's ``arguments``.
    """
    lines = [f"unset {name}" for name in settings.removed]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in settings.variables.items()]
    written: list[str] = []
    for path, text in settings.files.items():
        end = end_mark(text)
        written.append(f"mkdir -p {shlex.quote(str(path.parent))}")
        written.append(f"cat > {shlex.quote(str(path))} <<'{end}'\n{text.rstrip()}\n{end}")
    if written:  # a file may have the server's key; the agent's own files are not private
        lines += ["(", "umask 077", *written, ")"]
    lines.append(shlex.join([agent.executable, *settings.arguments, *arguments]))
    return "\n".join(lines)


def end_mark(text: str) -> str:
    """Return an end mark for a here-document: a word that is not a line of ``text``."""
    mark = "EOF"
    while re.search(rf"^{mark}$", text, re.MULTILINE):
        mark += "_"
    return mark
