"""Processes of MCP servers, results and HTTP bodies, without the ``mcp`` package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from treadle.errors import TreadleError
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.http_bounds import BoundedStream
from treadle.mcp.process import NOISE, ToolServerProcess
from treadle.mcp.results import text_of
from treadle.mcp.toolbox import reason_of

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


async def started(program: str, **bounds: Any) -> ToolServerProcess:
    config = ToolServerConfig("p", sys.executable, ("-Ic", program))
    return await ToolServerProcess.start(config, ToolBounds(message_bytes=1000, **bounds))


def test_lines_go_there_and_back() -> None:
    async def talk() -> tuple[bytes, bool, bytes]:
        process = await started(ECHO)
        await process.write(b'{"a": 1}')
        first = await process.read()
        over = await process.has_ended()
        await process.close()
        return first, over, await process.read()

    assert asyncio.run(talk()) == (b'{"a": 1}\n', False, b"")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import sys; print('a\\nlast', file=sys.stderr); sys.exit(4)",
            "it ended with exit code 4: last",
        ),
        ("print('x' * 5000)", "it sent a message of more than 1000 bytes, and was stopped"),
    ],
)
def test_last_words(program: str, said: str) -> None:
    async def ends() -> str:
        process = await started(program)
        with suppress(TreadleError):
            assert await process.read() == b""
        told = await process.last_words()
        await process.close()
        return told

    assert asyncio.run(ends()) == said


def test_noise_and_programs_that_are_none() -> None:
    async def noisy() -> None:
        process = await started(ECHO)
        try:
            for _ in range(NOISE):
                process.noise()
            with pytest.raises(TreadleError, match="lines that are no messages"):
                process.noise()
            assert process.is_over
        finally:
            await process.close()
        with pytest.raises(TreadleError, match="no program 'nope' in PATH"):
            await ToolServerProcess.start(ToolServerConfig("p", "nope"), ToolBounds())
        bad = ToolServerConfig("p", sys.executable, cwd="/no/such/folder")
        with pytest.raises(TreadleError, match="cannot start"):
            await ToolServerProcess.start(bad, ToolBounds())

    asyncio.run(noisy())


def block(kind: str, **fields: Any) -> Any:
    return SimpleNamespace(type=kind, **fields)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([block("text", text="a"), block("text", text="b")], "a\nb"),
        (
            [block("image", data="A" * 4000, mime_type="image/png")],
            "[a picture, not shown: image/png, 2.9 KiB]",
        ),
        ([block("resource_link", uri="file:///x")], "[a link, not shown: file:///x]"),
        ([block("resource", resource=SimpleNamespace(text="words"))], "words"),
        ([], '{"n": "é"}'),
    ],
)
def test_results_as_texts(content: Any, text: str) -> None:
    result = SimpleNamespace(content=content, structured_content={"n": "é"}, is_error=False)
    assert text_of(result) == text
    result.is_error = True
    assert text_of(result) == f"error: {text}"


def test_a_body_is_bounded() -> None:
    class Parts(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 10

    async def read(most: int) -> bytes:
        stream = BoundedStream(Parts(), most)
        found = b"".join([part async for part in stream])
        await stream.aclose()
        return found

    assert asyncio.run(read(30)) == b"x" * 30
    with pytest.raises(TreadleError, match="more than 29 bytes"):
        asyncio.run(read(29))


def test_reasons() -> None:
    inner = TreadleError("why\x1b")
    group = Exception("many")
    group.exceptions = (inner,)  # type: ignore[attr-defined]
    assert reason_of(group) == "why\\x1b"
    assert reason_of(ValueError("x")) == "ValueError: x"
