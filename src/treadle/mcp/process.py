"""The process of an MCP server: limits its messages, keeps its last line of standard error."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from contextlib import suppress

from treadle.base.python_process import detached
from treadle.errors import TreadleError, printable
from treadle.mcp.config import ToolBounds, ToolServerConfig

MOMENT_S = 0.2
END_S = 1.0  # after its input is closed, and again after it was asked to end
MAX_WORDS = 300  # characters of what it wrote last
NOISE = 1000  # lines that are no messages, after which it is stopped


class ToolServerProcess:
    """The process of a server that reads and writes one JSON message a line; ``bounds`` limit its
    messages. ``close`` it.
    """

    def __init__(self, process: asyncio.subprocess.Process, bounds: ToolBounds) -> None:
        self._process = process
        self._bounds = bounds
        self._words: deque[str] = deque(maxlen=1)
        self._n_noise = 0
        self.flood = ""  # what it sent too much of
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, config: ToolServerConfig, bounds: ToolBounds) -> ToolServerProcess:
        """Start the program of ``config``, whose messages ``bounds`` limit. Raises TreadleError if
        it cannot be started.
        """
        environment = config.environment()
        program = shutil.which(config.command, path=environment.get("PATH"))
        if program is None:
            raise TreadleError(f"no program {config.command!r:.200} in PATH")
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *config.args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd=config.cwd,
                limit=bounds.message_bytes,
                **detached(),
            )
        except (OSError, ValueError) as error:
            raise TreadleError(f"cannot start {config.command!r:.200}: {error}") from error
        return cls(process, bounds)

    async def _listen(self) -> None:
        """Read the server's standard error to its end, and keep the last line."""
        stream = self._process.stderr
        assert stream is not None
        kept = b""
        while octets := await stream.read(1 << 16):
            kept = (kept + octets)[-4096:]
            lines = [line for line in kept.decode("utf-8", "replace").splitlines() if line.strip()]
            if lines:
                self._words.append(lines[-1].strip())

    async def read(self) -> bytes:
        """Return the next line of the server's output, b"" at the end. Raises TreadleError for a
        line that is too long.
        """
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline()
        except ValueError:  # longer than the limit
            most = self._bounds.message_bytes
            raise self.flood_error(f"a message of more than {most} bytes") from None

    def noise(self) -> None:
        """Count a line of output that is no message. Raises TreadleError for too many."""
        self._n_noise += 1
        if self._n_noise > NOISE:
            raise self.flood_error(f"more than {NOISE} lines that are no messages")

    def flood_error(self, what: str) -> TreadleError:
        """Record that the server sent too much: ``what``, such as "a message of more than 9 bytes".
        Return the error, for the caller to raise.
        """
        self.flood = f"it sent {what}, and was stopped"
        return TreadleError(self.flood)

    async def write(self, message: bytes) -> None:
        """Send one message. Raises OSError."""
        assert self._process.stdin is not None
        self._process.stdin.write(message + b"\n")
        await self._process.stdin.drain()

    @property
    def is_over(self) -> bool:
        """Whether the process is known to have ended, or was stopped."""
        return bool(self.flood) or self._process.returncode is not None

    async def has_ended(self) -> bool:
        """Wait up to MOMENT_S seconds for the end of the process, and return ``is_over``."""
        if not self.is_over:
            with suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), MOMENT_S)
        return self.is_over

    async def last_words(self) -> str:
        """Return why the server does not answer: too much output, or exit code and last line."""
        if self.flood:
            return self.flood
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.wait()), END_S)
            await asyncio.wait_for(asyncio.shield(self._listening), END_S)
        code = self._process.returncode
        said = f": {printable(self._words[0])[:MAX_WORDS]}" if self._words else ""
        return f"it ended with exit code {code}{said}" if code is not None else f"no answer{said}"

    async def close(self) -> None:
        """End the process: close its stdin, terminate it, kill it, each END_S seconds apart."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        for act in (None, process.terminate, process.kill):
            if process.returncode is not None:
                break
            if act is not None:
                with suppress(ProcessLookupError):
                    act()
            with suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(read_until_exit(process), END_S)
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening


async def read_until_exit(process: asyncio.subprocess.Process) -> None:
    """Wait for the process; meanwhile read its output, so that a full pipe does not block it."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass
    await process.wait()
