"""The file of MCP servers: what other programs write, and what is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import FileError
from treadle.mcp.config import ToolServerConfig, read_config

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, value: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_servers_of_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("PATH", "/bin")
    servers = {
        "files": {"command": "npx", "args": ["-y", "server"], "env": {"A": "b"}, "type": "stdio"},
        "web": {"url": "https://a.example/mcp", "headers": {"Authorization": "Bearer t"}},
        "off": {"command": "x", "disabled": True},
    }
    files, web = read_config(write(tmp_path, {"mcpServers": servers, "theme": "dark"}))
    assert files == ToolServerConfig("files", "npx", ("-y", "server"), {"A": "b"})
    assert (web.url, web.headers) == ("https://a.example/mcp", {"Authorization": "Bearer t"})
    environment = files.environment()
    assert environment["A"] == "b"
    assert environment["PATH"] == "/bin"
    assert "SECRET" not in environment


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "no JSON"),
        ({"servers": {}}, 'no object "mcpServers"'),
        ({"mcpServers": {"a": {"comand": "x"}}}, "a: unknown key 'comand'; did you mean command?"),
        ({"mcpServers": {"a": {}}}, "mcpServers.a: no command"),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "mcpServers.a: args"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "expected an object of texts"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://b"}}}, "type 'sse' is not supported"),
        ({"mcpServers": {"a": {"url": "b"}}}, "mcpServers.a: url 'b'"),
        ({"mcpServers": {"a": {"command": "x", "disabled": "no"}}}, "expected true or false"),
        ({"mcpServers": {"a": {"command": "x", "type": ["stdio"]}}}, "type ['stdio'] is not"),
        (
            {"mcpServers": {"a": {"url": "http://b", "command": "x"}}},
            "unknown key 'command', which http has not",
        ),
        (
            {"mcpServers": {"a": {"command": "x", "header": {}}}},
            "unknown key 'header' (expected command",
        ),
    ],
)
def test_errors(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        read_config(write(tmp_path, value))
    assert said in str(caught.value)
    assert "mcp.json" in str(caught.value)


def test_the_file_of_the_documents(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mcp.md").read_text("utf-8")
    text = page.partition("```json\n")[2].partition("```")[0]
    assert [server.name for server in read_config(write(tmp_path, text))] == ["files", "search"]
