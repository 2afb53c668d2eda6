"""Downloads, removal and copies of models by clients of the router (``--library``).

A copy is a further name in a file of the router, not a second file. Names that clients send are
those of Ollama (``hf.co/OWNER/REPO:TYPE``) and of treadle (``hf:OWNER/REPO:TYPE``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.base.validate import file_name
from treadle.catalog.names import LATEST
from treadle.errors import TreadleError
from treadle.jit.cache import folder, write_whole
from treadle.server.http.api_errors import ApiError
from treadle.server.router.served_model import ServedModel

WEBSITES = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
COPIES = "router-copies.json"
MOST_COPIES = 1000
MOST_NAME = 200
REPORT_S = 0.2


@dataclass(frozen=True)
class DownloadProgress:
    """Progress of a download: ``done`` of ``total`` bytes of ``file``. The last one has only the
    downloaded model's ``path``.
    """

    file: str = ""
    done: int = 0
    total: int = 0
    path: Path | None = None


class DownloadCancelledError(Exception):
    """Raised inside a download to stop it, because the client that asked for it has left."""


def hub_name(name: str) -> str:
    """Return ``name``, a client's name of a model, in the form ``hf:OWNER/REPO...``. Raises
    ApiError for one without an owner.
    """
    rest = name.removesuffix(LATEST)
    for website in WEBSITES:
        rest = rest.removeprefix(website)
    rest = rest.removeprefix("hf:")
    if rest.count("/") < 1 or not rest.isprintable() or len(rest) > MOST_NAME:
        raise ApiError(
            400,
            f"model {name[:MOST_NAME]!r}: no name on the hub; expected hf.co/OWNER/REPO:TYPE",
            param="model",
        )
    return f"hf:{rest}"


async def download(ref: str) -> AsyncIterator[DownloadProgress]:
    """Download the model ``ref`` (``hf:...``), and yield the progress. If the iterator is closed,
    the download stops; the bytes that have arrived are kept. Raises TreadleError if the download
    fails.
    """
    from treadle.hub import download as fetch

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[DownloadProgress | BaseException] = asyncio.Queue()
    stopped = False
    told_s = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal told_s
        if stopped:
            raise DownloadCancelledError
        now = loop.time()
        if now - told_s >= REPORT_S or (total and done >= total):
            told_s = now
            file = stage.removeprefix("downloading ")
            loop.call_soon_threadsafe(queue.put_nowait, DownloadProgress(file, done, total))

    def work() -> None:
        try:
            path = fetch(ref, progress=report, say=lambda text: None, to_run=False)
            result: DownloadProgress | BaseException = DownloadProgress(path=path)
        except BaseException as error:
            result = error
        loop.call_soon_threadsafe(queue.put_nowait, result)

    task = loop.run_in_executor(None, work)
    try:
        while True:
            told = await queue.get()
            if isinstance(told, BaseException):
                raise told
            yield told
            if told.path is not None:
                return
    finally:
        stopped = True
        if task.done():
            await task


def remove_model(model: ServedModel) -> int:
    """Remove a downloaded model from this machine; return the bytes freed. Raises ApiError if it is
    not there, TreadleError if a program uses it.
    """
    from treadle.catalog.removal import check_unused, plan_removal, remove
    from treadle.catalog.stored import find_stored

    everything = find_stored()
    chosen = [each for each in everything if str(each.path) == model.ref]
    if not chosen:
        raise ApiError(404, f"{model.name}: no such model on this machine", param="model")
    plan = plan_removal(chosen, everything)
    check_unused(plan)
    return remove(plan, everything)


class CopiedNames:
    """Further names that clients gave models, kept in the JSON file ``path``, by default one in
    treadle's cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = folder() / COPIES if path is None else path
        self.names: dict[str, str] = self._read()

    def _read(self) -> dict[str, str]:
        try:
            with open(file_name(self.path), encoding="utf-8") as file:
                value = json.load(file)
        except (OSError, ValueError):
            return {}
        if not isinstance(value, dict):
            return {}
        return {name: of for name, of in value.items() if isinstance(of, str)}

    def __call__(self) -> Mapping[str, str]:
        """Return a mapping from the further names to the models' own names."""
        return self.names

    def add(self, name: str, original: str) -> None:
        """Store ``name`` as a further name of the model ``original``. Raises ApiError for an
        unusable name, TreadleError if the file cannot be written.
        """
        if not name or len(name) > MOST_NAME or not name.isprintable() or name.startswith("/"):
            raise ApiError(400, "destination: expected a name", param="destination")
        if len(self.names) >= MOST_COPIES:
            raise ApiError(400, f"there are already {MOST_COPIES} copied names")
        self.names[name] = original
        self._write()

    def remove(self, name: str) -> bool:
        """Remove a further name; return whether there was one."""
        if self.names.pop(name, None) is None:
            return False
        self._write()
        return True

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.names).encode())
        except OSError as error:
            raise TreadleError(f"the name cannot be kept: {error.strerror or error}") from error
