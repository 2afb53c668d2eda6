"""Resumable download of a large file into huggingface_hub's cache.

huggingface_hub deletes what an interrupted download has written (from version 2 on). Here it stays,
as ``blobs/ETAG.incomplete``, and the next download asks for the rest. huggingface_hub then finds a
whole blob, and links it into the snapshot.

A note about each unfinished file is kept in treadle's own cache folder: the hub's cache does not
tell which file a blob will be.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.errors import CacheError, FileError
from treadle.files.projector_files import is_projector_name
from treadle.hub import cache
from treadle.hub.failure import is_unreached
from treadle.hub.name import HubName
from treadle.jit.cache import checked_folder, write_whole
from treadle.jit.cache import folder as own_cache

RESUMED_FROM = 16 << 20  # bytes: smaller files are downloaded again from the start
PLAIN_HTTP = 50 * 10**9  # bytes: the hub sends larger files by its own protocol only
ATTEMPTS = 5  # in a row without a single byte
CHUNK = 1 << 20  # bytes
SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a large file; small ones have git's SHA-1
ETAG = re.compile(r"[\w-]+", re.ASCII)
INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class UnfinishedDownload:
    """An interrupted download of one file of a model.

    ref: name that resumes it; paths: all files of the model, in its repository; n_bytes: of all
    these files, 0 if unknown; part: the local file with the bytes so far; note: the JSON file with
    these facts.
    """

    ref: str
    repo: str
    paths: tuple[str, ...]
    n_bytes: int
    part: Path
    note: Path

    @property
    def n_done(self) -> int:
        """Bytes of the unfinished file that have arrived."""
        try:
            return self.part.stat().st_size
        except OSError:
            return 0


def fetch_blob(
    name: HubName, path: str, paths: Sequence[str], n_bytes: int, report: type[Any]
) -> None:
    """Download the file ``path`` of a repository into the cache's blobs, continuing an interrupted
    download. Do nothing for small and very large files, files that are there, and in offline mode:
    huggingface_hub handles these.

    ``paths``, ``n_bytes``: all files of the model, and their bytes together, for the note that a
    later call resumes from (``write_note``). ``report``: a class in place of tqdm's progress bar.
    Raises huggingface_hub's errors, and FileError if the bytes of a continued file do not have the
    SHA-256 that the hub announced.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE or getattr(constants, "HF_XET_HIGH_PERFORMANCE", False):
        return
    url = hf_hub_url(name.repo, path, revision=name.revision)
    announced = get_hf_file_metadata(url)
    etag = announced.etag or ""
    size = announced.size or 0
    if not RESUMED_FROM <= size <= PLAIN_HTTP or not ETAG.fullmatch(etag):
        return
    blob = cache.repository(name.repo) / "blobs" / etag
    lock = cache.cache_folder() / ".locks" / blob.parent.parent.name / f"{etag}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        part = blob.with_name(etag + INCOMPLETE)
        note = write_note(name, paths, n_bytes, part)
        with report(total=size, initial=min(size_of(part), size)) as bar:
            resumed = receive(url, part, size, bar)
        if resumed and SHA256.fullmatch(etag) and sha256_of(part) != etag:
            part.unlink()
            raise FileError(
                "the downloaded bytes are not those that the hub announced: download it again",
                path=f"{name.root}/{path}",
            )
        os.replace(part, blob)
    if note is not None:
        note.unlink(missing_ok=True)


def receive(url: str, part: Path, size: int, bar: Any) -> bool:
    """Append the missing bytes of the file at ``url``, which has ``size`` bytes, to ``part``;
    return whether ``part`` held some before. A lost connection is retried until ``ATTEMPTS`` in a
    row brought nothing. ``bar``: a progress bar with tqdm's methods. Raises FileError or the HTTP
    library's errors.
    """
    if size_of(part) > size:
        part.unlink()
    resumed = size_of(part) > 0
    left = ATTEMPTS
    while (before := size_of(part)) < size:
        try:
            receive_once(url, part, size, bar)
        except Exception as error:
            if not is_unreached(error) or size_of(part) == 0:
                raise
            left = ATTEMPTS if size_of(part) > before else left - 1
            if left == 0:
                raise
            time.sleep(1)
        else:
            if size_of(part) == before:
                raise FileError(
                    f"the server sent nothing after byte {before}",
                    path=url,
                    expected=f"{size} bytes",
                )
    return resumed


def receive_once(url: str, part: Path, size: int, bar: Any) -> None:
    """Request the bytes that ``part`` lacks of the file at ``url``, which has ``size`` bytes, and
    append them. If the server ignores the range and sends the whole file, ``part`` is written anew.
    ``bar``: as in ``receive``.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    at = size_of(part)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if at:
        headers["Range"] = f"bytes={at}-"
    stream = get_session().stream(
        "GET",
        url,
        headers=headers,
        follow_redirects=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    with stream as response:
        if response.status_code >= 400:
            response.read()  # the error's text
        hf_raise_for_status(response)
        whole = at > 0 and response.status_code == 200
        if whole:
            bar.update(-at)
            at = 0
        with open(part, "wb" if whole else "ab") as file:
            for chunk in response.iter_bytes(CHUNK):
                file.write(chunk[: size - at])
                file.flush()  # so that Ctrl-C loses nothing
                bar.update(len(chunk))
                at += len(chunk)


def size_of(path: Path) -> int:
    """Return a file's bytes, 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    import hashlib

    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()


# -- notes ----------------------------------------------------------------------------------------


def notes_folder() -> Path:
    """Return the folder of the notes about unfinished files. Raises CacheError without a home
    directory.
    """
    return own_cache() / "downloads"


def write_note(name: HubName, paths: Sequence[str], n_bytes: int, part: Path) -> Path | None:
    """Write the facts of ``UnfinishedDownload`` about the local file ``part`` as JSON, and return
    the path of this note; None if it cannot be written.
    """
    # A projector is downloaded before its model, which the name means.
    is_file = paths[0].lower().endswith(".gguf") and not is_projector_name(paths[0])
    about = {
        "ref": f"{name.root}/{paths[0]}" if is_file else str(name),
        "repo": name.repo,
        "paths": list(paths),
        "n_bytes": n_bytes,
        "part": str(part),
    }
    try:
        checked_folder()
        folder = notes_folder()
        folder.mkdir(exist_ok=True)
        note = folder / f"{part.stem}.json"
        write_whole(note, json.dumps(about).encode())
    except (CacheError, OSError):  # only ``treadle list`` needs it
        return None
    return note


def unfinished_downloads() -> Iterator[UnfinishedDownload]:
    """Yield the interrupted downloads whose parts are in the present cache folder."""
    blobs = cache.cache_folder()
    try:
        notes = sorted(notes_folder().glob("*.json"))
    except (CacheError, OSError):
        return
    for note in notes:
        with suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(note.read_bytes())
            part = Path(about["part"])
            if blobs in part.parents and part.is_file():
                paths = tuple(map(str, about["paths"]))
                yield UnfinishedDownload(
                    str(about["ref"]), str(about["repo"]), paths, int(about["n_bytes"]), part, note
                )
