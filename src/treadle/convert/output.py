"""From a checkpoint to one GGUF file (or shards of it), tensor by tensor.

::

    plan      what each tensor becomes, and where it goes: nothing is read yet
    write     into hidden parts beside the target; bytes that stay the same the kernel copies
    finish    to the disk, then renamed: the target is whole or as it was

Memory holds one tensor at most, and of one that is only mapped a few strips.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import treadle
from treadle.convert.finite import find_nonfinite, is_finite
from treadle.convert.opened import n_bytes_of
from treadle.convert.pagecache import PageCache
from treadle.convert.part import Journal, Part, is_full
from treadle.convert.recipe import Entry, Options, Shard, mapped_range, plan_shards
from treadle.convert.source import Source, SourceTensor
from treadle.errors import FileError, TreadleError
from treadle.files.mapping import mappings_of
from treadle.files.target import check_room, check_target, files_of
from treadle.formats import FORMATS
from treadle.runtime.sigbus import guard_mappings

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]

STAGE = "converting"  # what the progress bar says
STRIP = 1 << 22  # weights converted at a time, for each thread
COPY = 64 << 20  # bytes copied between two reports
MAX_WORKERS = 16


def convert(
    source: Source,
    target: Path,
    options: Options,
    *,
    progress: Progress = lambda stage, done, total: None,
    say: Say = lambda text: None,
    cache: PageCache | None = None,
) -> list[Path]:
    """Write ``source`` as ``target`` (or as its shards); the paths that were written.

    A run that was killed, or found the disk full, leaves its part beside the target, and the same
    call continues it. ``cache`` knows what was in memory before ``source`` was opened; it is closed
    at the end. Raises FileError, which names the tensor, or the file that shrank or was
    written to meanwhile, and UnsupportedError; the target is then as it was.
    """
    guard_mappings()
    shards = plan_shards(source, target, options)
    inputs = [*_files(source), *files_of(source.path)]
    for shard in shards:
        check_target(shard.path, inputs, force=options.force)
    conversion = _Conversion(source, shards, options, progress, say)
    conversion.cache = cache or PageCache(())
    conversion.cache.add(part.path for t in source.tensors.values() for part in t.ranges)
    try:
        return conversion.run()
    finally:
        conversion.cache.close()


class _Conversion:
    def __init__(
        self, source: Source, shards: list[Shard], options: Options, progress: Progress, say: Say
    ) -> None:
        self.source, self.shards, self.options = source, shards, options
        self.progress, self.say = progress, say
        self.n_total = sum(entry.n_bytes for shard in shards for entry in shard.entries)
        self.n_done = 0
        self.cache = PageCache(())
        self.mapped = mappings_of(_files(source))
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.workers = min(MAX_WORKERS, mine or 1)

    def run(self) -> list[Path]:
        parts: list[Part] = []
        try:
            for shard in self.shards:
                parts.append(Part(shard.path, shard.layout.n_bytes))
            return self._run(parts)
        except OSError as e:
            where = e.filename or self.shards[0].path
            why = is_full(e) or f"cannot be written: {e.strerror or e}"
            raise FileError(why, path=where) from e
        finally:
            for part in parts:
                part.close(discard_empty=True)

    def _run(self, parts: list[Part]) -> list[Path]:
        journal = Journal(parts, self._job(), resume=self.options.resume)
        if journal.discarded:
            self.say("an unfinished part of another conversion was discarded")
        n_tensors = sum(len(shard.entries) for shard in self.shards)
        if journal.done:
            self.say(f"continues: {len(journal.done)} of {n_tensors} tensors are there already")
        try:
            if not journal.done:  # else what is done would be thrown away for want of the rest
                self._check_room(parts)
            try:
                self._write_all(parts, journal)
            except (OSError, TreadleError):
                self.mapped.check(now=True)  # bytes that are gone make other things fail first
                raise
            self.mapped.check(now=True)
            journal.save()
        except TreadleError:
            journal.remove()
            raise
        except OSError as e:
            with contextlib.suppress(OSError):
                journal.save()
            why = is_full(e) or f"cannot be written: {e.strerror or e}"
            raise FileError(
                f"{why}; what is done is kept in {parts[0].path.name}: the same command continues",
                path=self.shards[0].path,
            ) from e
        except (KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM
            with contextlib.suppress(OSError):
                journal.save()
            self.say("what is done is kept: the same command continues")
            raise
        finally:
            journal.close()
        for part in parts:
            part.path.replace(part.target)
        journal.path.unlink()
        _sync_folder(parts[0].target.parent)
        return [part.target for part in parts]

    def _job(self) -> str:
        """A digest of all that decides the bytes: sources, headers, and how weights change."""
        digest = hashlib.sha256(f"{treadle.__version__} {self.options.allow_nonfinite}".encode())
        for path in _files(self.source):
            about = path.stat()
            told = (str(path.absolute()), about.st_size, about.st_mtime_ns, about.st_ino)
            digest.update(repr(told).encode("utf-8", "surrogateescape"))
        for shard in self.shards:
            digest.update(hashlib.sha256(shard.layout.header).digest())
            for entry in shard.entries:
                told_of = (entry.tensor.origin, entry.tensor.ggml_type)
                digest.update(repr(told_of).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _check_room(self, parts: list[Part]) -> None:
        """Better now than after hours. Blocks that can be shared with the source need no room."""
        folder = self.shards[0].path.parent
        about, here = os.statvfs(folder), os.stat(folder).st_dev
        shared = self.options.alignment % about.f_frsize == 0 and any(
            path.stat().st_dev == here for path in _files(self.source)
        )
        need = sum(part.n_bytes - os.fstat(part.fd).st_blocks * 512 for part in parts)
        if not shared:
            check_room(self.shards[0].path, need)

    # -- tensors ------------------------------------------------------------------------------

    def _write_all(self, parts: list[Part], journal: Journal) -> None:
        index = 0
        with ThreadPoolExecutor(self.workers) as pool:
            for shard, part in zip(self.shards, parts, strict=True):
                part.write(np.frombuffer(shard.layout.header, np.uint8), 0)
                for entry in shard.entries:
                    self.progress(STAGE, self.n_done, self.n_total)
                    if index not in journal.done:
                        self.cache.expect(entry.tensor.ranges)
                        self._write(entry, part, shard.layout.offsets[entry.tensor.name], pool)
                        self.cache.drop(entry.tensor.ranges)
                        self.mapped.check()
                        journal.add(index, entry.n_bytes)
                    else:
                        self.n_done += entry.n_bytes
                    index += 1
        self.progress(STAGE, self.n_done, self.n_total)

    def _write(self, entry: Entry, part: Part, at: int, pool: ThreadPoolExecutor) -> None:
        tensor = entry.tensor
        data = tensor.read()
        if data.dtype != np.uint8 or data.nbytes != n_bytes_of(tensor):
            raise self._error(tensor, f"{data.nbytes} bytes of {data.dtype}")
        data = data.reshape(-1)
        if entry.encode is None:
            self._copy(entry, data, part, at)
            return
        for piece in self._encoded(entry, data, pool):
            part.write(piece, at)
            at += len(piece)
            self._advance(len(piece))

    def _copy(self, entry: Entry, data: Bytes, part: Part, at: int) -> None:
        """Bytes that stay the same: by the kernel, when they lie in a file in one piece."""
        lies = mapped_range(entry.tensor, data)
        files = (file.reopen() for file in self.mapped.files if lies and file.path == lies.path)
        fd = next(files, None)
        start = lies.offset if lies else 0
        step = COPY // entry.row_bytes * entry.row_bytes or entry.row_bytes
        try:
            for begin in range(0, len(data), step):
                strip = data[begin : begin + step]
                self._check(entry, strip, begin)
                if fd is None or not part.copy(fd, start + begin, len(strip), at + begin):
                    part.write(strip, at + begin)
                self._advance(len(strip))
        finally:
            if fd is not None:
                os.close(fd)

    def _encoded(self, entry: Entry, data: Bytes, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
        """The tensor in its new format, strip by strip; some strips ahead, each in a thread."""
        source, target = FORMATS[entry.tensor.ggml_type], entry.encode
        assert target is not None
        k = entry.tensor.shape[-1] if entry.tensor.shape else 1
        step = max(1, STRIP // max(k, 1)) * entry.row_bytes

        def encode(begin: int) -> Bytes:
            strip = data[begin : begin + step]
            self._check(entry, strip, begin)
            rows = source.dequantize_rows(strip.reshape(-1, entry.row_bytes))
            made = target.quantize_rows(rows).reshape(-1)
            if not self.options.allow_nonfinite and not is_finite(target, made):
                expected = "a wider type, or --allow-nonfinite"
                what = f"has weights too large for {target.name}"
                raise self._error(entry.tensor, what, expected)
            return made

        ahead: deque[Future[Bytes]] = deque()
        try:
            for begin in range(0, len(data), step):
                ahead.append(pool.submit(encode, begin))
                if len(ahead) > self.workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def _check(self, entry: Entry, strip: Bytes, begin: int) -> None:
        fmt = FORMATS.get(entry.tensor.ggml_type)
        if self.options.allow_nonfinite or fmt is None or is_finite(fmt, strip):
            return
        block = begin // fmt.dtype.itemsize + find_nonfinite(fmt, strip)
        k = entry.tensor.shape[-1] if entry.tensor.shape else 1
        row, column = divmod(block * fmt.block, k)
        what = f"holds a weight that is no finite number, in row {row}, column {column}"
        if fmt.block > 1:
            what = f"has a block whose scale is no finite number, in row {row}, column {column}"
        raise self._error(entry.tensor, what, "finite weights, or --allow-nonfinite")

    def _advance(self, n_bytes: int) -> None:
        self.n_done += n_bytes
        self.progress(STAGE, self.n_done, self.n_total)

    def _error(self, tensor: SourceTensor, what: str, expected: str | None = None) -> FileError:
        path = tensor.ranges[0].path if tensor.ranges else self.source.path
        return FileError(what, path=path, where=tensor.name, expected=expected)


def _files(source: Source) -> list[Path]:
    """Every file that the output may depend on."""
    paths: set[Any] = {part.path for t in source.tensors.values() for part in t.ranges}
    if source.path.is_dir():
        beside = (p for p in source.path.iterdir() if not p.name.startswith("."))
        paths |= {p for p in beside if p.suffix != ".gguf" and p.is_file()}
    else:
        paths.add(source.path)
    return sorted(paths)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk as well."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
