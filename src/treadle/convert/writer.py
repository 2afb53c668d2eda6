"""Writes a checkpoint as one GGUF file (or shards), tensor by tensor.

::

    plan      the type and place of each tensor: no data is read yet
    write     into hidden parts next to the target; the kernel copies unchanged bytes
    finish    flush to the disk, then rename: the target is complete or unchanged

Memory holds one tensor at most; of a mapped tensor, only a few strips.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.convert.page_cache import PageCache
from treadle.convert.partial_file import Journal, PartFile, is_full
from treadle.convert.recipe import Options, OutputTensor, Shard, plan_shards, too_large
from treadle.convert.sources.check_finite import find_nonfinite, is_finite, nonfinite_message
from treadle.convert.sources.source import Bytes, Source, SourceTensor
from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.devices.cpu.weight_quantizer import quantize_rows
from treadle.errors import FileError, TreadleError
from treadle.files.mapping import mappings_of
from treadle.files.target import check_room, check_target, files_of
from treadle.files.tensor import TensorData
from treadle.formats import FORMATS
from treadle.system import SYSTEM

Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]
Change = Callable[[OutputTensor, Bytes, int], Bytes]

STAGE = "converting"  # label of the progress bar
TASK_WEIGHTS = 1 << 18  # weights per task: its temporaries stay in cache
AHEAD = 3  # finished strips per thread that may wait to be written
COPY = 64 << 20  # bytes copied between two reports
MAX_WORKERS = 16


@dataclass(frozen=True, eq=False)
class WriteJob:
    """The output to write, and how to encode it.

    encode: ``encode(entry, rows, begin)`` converts some rows of a source tensor, uint8 [n_bytes]
        from its byte ``begin`` on, to output rows, uint8 [n_bytes]. Raises FileError.
    check: has the same arguments; checks rows that are copied unchanged. Raises FileError.
    asked: digest of all options that determine the bytes, besides sources, headers and types.
    workers: number of encoding threads. stage: label of the progress bar.
    resume: continue the part file of an interrupted run.
    """

    source: Source
    shards: list[Shard]
    encode: Change
    check: Callable[[OutputTensor, Bytes, int], None]
    asked: bytes
    workers: int
    stage: str = STAGE
    resume: bool = True


def convert(
    source: Source,
    target: Path,
    options: Options,
    *,
    progress: Progress = lambda stage, done, total: None,
    say: Say = lambda text: None,
    cache: PageCache | None = None,
) -> list[Path]:
    """Write ``source`` as ``target`` (or as its shards) and return the paths written.

    ``progress``, ``say`` and FileErrors are those of ``write``; UnsupportedError for a type that
    cannot be written. ``cache`` has recorded the pages in memory before ``source`` was opened; it
    is closed at the end.
    """
    guard_mappings()
    with closing(cache or PageCache(())) as pages:
        shards = plan_shards(source, target, options)
        inputs = [*_files(source), *files_of(source.path)]
        for shard in shards:
            check_target(shard.path, inputs, force=options.force)
        if options.split_max and (text := too_large(shards, options.split_max)):
            say(text)
        coder = _Coder(options.allow_nonfinite)
        mine = len(SYSTEM.affinity())
        work = WriteJob(
            source,
            shards,
            coder.encode,
            coder.check,
            str(options.allow_nonfinite).encode(),
            min(MAX_WORKERS, mine),
            resume=options.resume,
        )
        pages.add(part.path for t in source.tensors.values() for part in t.ranges)
        return write(work, progress, say, pages)


class _Coder:
    """The ``encode`` and ``check`` of a conversion: dequantise rows and quantise them to another
    format. Both raise FileError for infinities and NaNs unless they are allowed.
    """

    def __init__(self, allow_nonfinite: bool) -> None:
        self.allow_nonfinite = allow_nonfinite

    def encode(self, entry: OutputTensor, rows: Bytes, begin: int) -> Bytes:
        self.check(entry, rows, begin)
        target = entry.encode
        tensor = entry.tensor
        assert target is not None
        weights = FORMATS[tensor.ggml_type].dequantize_rows(rows.reshape(-1, tensor.row_bytes))
        result = quantize_rows(target, weights).reshape(-1)
        if not self.allow_nonfinite and not is_finite(target, result, tensor.k):
            expected = "a wider type, or --allow-nonfinite"
            raise tensor.error(f"has weights too large for {target.name}", expected)
        return result

    def check(self, entry: OutputTensor, rows: Bytes, begin: int) -> None:
        tensor = entry.tensor
        fmt = FORMATS.get(tensor.ggml_type)
        if self.allow_nonfinite or fmt is None or is_finite(fmt, rows, tensor.k):
            return
        first = begin // tensor.row_bytes * (tensor.k // fmt.block)
        block = first + find_nonfinite(fmt, rows, tensor.k)
        what = nonfinite_message(fmt, block, tensor.k)
        raise tensor.error(what, "finite weights, or --allow-nonfinite")


def write(work: WriteJob, progress: Progress, say: Say, cache: PageCache) -> list[Path]:
    """Write all shards of ``work`` and return their paths.

    A killed run, or one that filled the disk, leaves its part next to the target; the same job
    resumes it and reports so through ``say``. ``progress(stage, done, total)`` counts bytes of the
    source. Pages of the files in ``cache`` are dropped after reading. Raises FileError, which names
    the tensor, or the file that shrank or was written to meanwhile; the target is then unchanged.
    """
    return _Writer(work, progress, say, cache).run()


class _Writer:
    def __init__(self, work: WriteJob, progress: Progress, say: Say, cache: PageCache) -> None:
        self.work = work
        self.source = work.source
        self.shards = work.shards
        self.progress = progress
        self.say = say
        self.cache = cache
        entries = [entry for shard in work.shards for entry in shard.entries]
        self.n_total = sum(entry.tensor.n_bytes for entry in entries)
        self.n_done = 0
        self.mapped = mappings_of(_files(work.source))

    def run(self) -> list[Path]:
        parts: list[PartFile] = []
        try:
            for shard in self.shards:
                parts.append(PartFile(shard.path, shard.layout.n_bytes))
            return self._run(parts)
        except OSError as e:
            where = e.filename or self.shards[0].path
            why = is_full(e) or f"cannot be written: {e.strerror or e}"
            raise FileError(why, path=where) from e
        finally:
            for part in parts:
                part.close(discard_empty=True)

    def _run(self, parts: list[PartFile]) -> list[Path]:
        journal = Journal(parts, self._job(), resume=self.work.resume)
        if journal.discarded:
            self.say("discarded an unfinished .part file of a different conversion")
        n_tensors = sum(len(shard.entries) for shard in self.shards)
        if journal.done:
            self.say(f"resuming: {len(journal.done)} of {n_tensors} tensors are already written")
        try:
            if not journal.done:  # else a resumed part would be discarded if the rest does not fit
                self._check_room(parts)
            try:
                self._write_all(parts, journal)
            except (OSError, TreadleError):
                self.mapped.check(now=True)  # a file that shrank can cause other errors first
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
                f"{why}; partial output kept in {parts[0].path.name}: run the same command to "
                "resume",
                path=self.shards[0].path,
            ) from e
        except (KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM
            with contextlib.suppress(OSError):
                journal.save()
            self.say("partial output kept: run the same command to resume")
            raise
        finally:
            journal.close()
        for part in parts:
            part.replace_target()
        journal.path.unlink()
        SYSTEM.sync_folder(parts[0].target.parent)
        return [part.target for part in parts]

    def _job(self) -> str:
        """Return a hex digest of everything that determines the bytes: sources, headers, types,
        options. A part file with another digest is discarded.
        """
        digest = hashlib.sha256(f"{__version__} ".encode() + self.work.asked)
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

    def _check_room(self, parts: list[PartFile]) -> None:
        """Raise FileError if the disk lacks room. Blocks that can be shared with the source need
        none.
        """
        first = self.shards[0]
        folder = first.path.parent
        block = SYSTEM.block_bytes(folder)
        here = os.stat(folder).st_dev
        shared = (
            block > 0
            and first.layout.alignment % block == 0
            and any(path.stat().st_dev == here for path in _files(self.source))
        )
        shared = shared and not any(e.encode for shard in self.shards for e in shard.entries)
        need = sum(part.n_bytes - SYSTEM.allocated(os.fstat(part.fd)) for part in parts)
        if not shared:
            check_room(first.path, need)

    # -- tensors ------------------------------------------------------------------------------

    def _write_all(self, parts: list[PartFile], journal: Journal) -> None:
        index = 0
        with ThreadPoolExecutor(self.work.workers) as pool:
            for shard, part in zip(self.shards, parts, strict=True):
                part.write(np.frombuffer(shard.layout.header, np.uint8), 0)
                for entry in shard.entries:
                    self._advance(0)
                    if index not in journal.done:
                        self.cache.expect(entry.tensor.ranges)
                        self._write(entry, part, shard.layout.offsets[entry.tensor.name], pool)
                        self.cache.drop(entry.tensor.ranges)
                        journal.add(index, entry.n_bytes)
                    else:
                        self.n_done += entry.tensor.n_bytes
                    index += 1
        self._advance(0)

    def _write(
        self, entry: OutputTensor, part: PartFile, at: int, pool: ThreadPoolExecutor
    ) -> None:
        tensor = entry.tensor
        data = tensor.read()
        if data.dtype != np.uint8 or data.nbytes != tensor.n_bytes:
            raise tensor.error(f"{data.nbytes} bytes of {data.dtype}")
        data = data.reshape(-1)
        if entry.encode is None:
            self._copy(entry, data, part, at)
            return
        for n_read, made in self._encoded(entry, data, pool):
            part.write(made, at)
            at += len(made)
            self._advance(n_read)

    def _copy(self, entry: OutputTensor, data: Bytes, part: PartFile, at: int) -> None:
        """Write ``data``, a tensor's unchanged bytes, to the part file at byte ``at``; the kernel
        copies them if they lie in one range of a file. Raises FileError if the job's ``check``
        does.
        """
        lies = mapped_range(entry.tensor, data)
        # A file inside a bundle starts past 0.
        whole = (file for file in self.mapped.files if not file.start)
        files = (file.reopen() for file in whole if lies and file.path == lies.path)
        fd = next(files, None)
        start = lies.offset if lies else 0
        step = COPY // entry.tensor.row_bytes * entry.tensor.row_bytes or entry.tensor.row_bytes
        try:
            for begin in range(0, len(data), step):
                strip = data[begin : begin + step]
                self.work.check(entry, strip, begin)
                if fd is None or not part.copy(fd, start + begin, len(strip), at + begin):
                    part.write(strip, at + begin)
                self._advance(len(strip))
        finally:
            if fd is not None:
                os.close(fd)

    def _encoded(
        self, entry: OutputTensor, data: Bytes, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Bytes]]:
        """Yield (number of source bytes, encoded bytes) for each strip of rows of ``data``, in the
        order of the rows; threads encode some strips ahead.
        """
        step = max(1, TASK_WEIGHTS // max(entry.tensor.k, 1)) * entry.tensor.row_bytes

        def encode(begin: int) -> tuple[int, Bytes]:
            strip = data[begin : begin + step]
            return len(strip), self.work.encode(entry, strip, begin)

        ahead: deque[Future[tuple[int, Bytes]]] = deque()
        try:
            for begin in range(0, len(data), step):
                ahead.append(pool.submit(encode, begin))
                if len(ahead) > AHEAD * self.work.workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def _advance(self, n_bytes: int) -> None:
        self.mapped.check()
        self.n_done += n_bytes
        self.progress(self.work.stage, self.n_done, self.n_total)


def mapped_range(tensor: SourceTensor, data: Bytes) -> TensorData | None:
    """Return the file range in which the bytes of ``data`` lie unchanged; None for computed bytes.

    A tensor lists the ranges that it reads, but not whether it changes their bytes. So check that
    ``data`` is a view of the mapping at that very offset.
    """
    if len(tensor.ranges) != 1 or tensor.ranges[0].n_bytes != data.nbytes:
        return None
    base: Any = data
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not data.flags.c_contiguous:
        return None
    start = np.frombuffer(base, np.uint8)
    offset = data.ctypes.data - start.ctypes.data
    return tensor.ranges[0] if offset == tensor.ranges[0].offset else None


def _files(source: Source) -> list[Path]:
    """Return every file that the output may depend on: the tensors' files, and for a folder all its
    files except hidden and GGUF ones.
    """
    paths: set[Any] = {part.path for t in source.tensors.values() for part in t.ranges}
    if source.path.is_dir():
        beside = (p for p in source.path.iterdir() if not p.name.startswith("."))
        paths |= {p for p in beside if p.suffix != ".gguf" and p.is_file()}
    else:
        paths.add(source.path)
    return sorted(paths)
