"""A session in a file: its tokens, keys and values as safetensors, which many programs read.

::

    __metadata__   format, version: what the file is; treadle: which one wrote it
                   model: a fingerprint of the model; kv, page: how keys and values are held
                   sha256.NAME: of each tensor's bytes
    ids            I32 [n]             the tokens
    kv_global      U8 [pages, bytes]   pages of the layers that see everything
    kv_local       U8 [pages, bytes]   of the layers with a window, the last pages alone

A page is laid out as ``kernels/kv.py`` says, the layers of its pool one behind another. In the last
page, what no token of the session has written is zero: it may be left of somebody else's text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors import FileError, TreadleError
from treadle.files.safetensors import SafeTensor, SafeTensors, open_file
from treadle.files.target import check_target, file_name
from treadle.kernels.kv import PAGE
from treadle.kvcache import GONE, Pool, Sequence
from treadle.runtime.threads import interrupts_held
from treadle.words import why

if TYPE_CHECKING:
    from treadle.session import Session

FORMAT, VERSION = "treadle session", "1"
IDS, BYTES = "I32", "U8"  # types of safetensors
SAMPLE = 64  # bytes of each tensor at its start, middle and end that the fingerprint reads
Octets = np.ndarray  # uint8


@dataclass(frozen=True)
class _Tensor:
    """One tensor to be written, in pieces of a page."""

    dtype: str
    shape: list[int]
    n_bytes: int
    pieces: Callable[[], Iterable[Octets]]

    def digest(self) -> str:
        state = hashlib.sha256()
        for piece in self.pieces():
            state.update(piece.data)
        return state.hexdigest()


def save_session(path: str | os.PathLike[str], session: Session) -> None:
    """Write the file, beside its place first, so that it is there whole or not at all.

    Raises FileError where it cannot be written, or would replace a file of the model.
    """
    path, engine = file_name(path), session.engine
    check_target(path, engine.gguf.paths, force=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with engine.lock, part.open("xb") as file:
            tensors = _tensors_of(session.seq)
            file.write(_header(_about(session), tensors))
            for tensor in tensors.values():
                for piece in tensor.pieces():
                    file.write(piece.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise FileError(f"cannot be written: {why(error)}", path=path) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _tensors_of(seq: Sequence) -> dict[str, _Tensor]:
    ids = np.array(seq.ids, "<i4")
    tensors = {"ids": _Tensor(IDS, [len(ids)], ids.nbytes, lambda: [ids.view(np.uint8)])}
    for pool, pages in zip(seq.cache.pools, seq.pages, strict=True):
        gone = [at for at, page in enumerate(pages) if page == GONE]
        held = list(pages[gone[-1] + 1 :] if gone else pages)
        shape = [len(held), pool.page_bytes]
        pieces = partial(_pieces, pool, held, len(ids) % PAGE)
        tensors[pool.const.name] = _Tensor(BYTES, shape, shape[0] * shape[1], pieces)
    return tensors


def _pieces(pool: Pool, pages: list[int], n_last: int) -> Iterator[Octets]:
    """``pages`` one by one; of the last the first ``n_last`` tokens, 0 for all."""
    for page in pages[:-1] if n_last else pages:
        yield pool.page(page)
    if n_last:
        last = pool.page(pages[-1]).copy()
        pool.layout.blank(last, n_last)
        yield last


def _header(about: dict[str, str], tensors: dict[str, _Tensor]) -> bytes:
    about = about | {f"sha256.{name}": tensor.digest() for name, tensor in tensors.items()}
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.n_bytes]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _about(session: Session) -> dict[str, str]:
    """What a file must say of itself to fit this session's model."""
    import treadle

    return {
        "format": FORMAT,
        "version": VERSION,
        "treadle": treadle.__version__,
        "model": _fingerprint(session),
        "kv": session.engine.cache.kv,
        "page": str(PAGE),
    }


def _fingerprint(session: Session) -> str:
    """A digest of what keys and values depend on: the model's numbers, its tensors' names, shapes
    and types, and some bytes of each, for reading all of a large model would take seconds.
    """
    gguf, config = session.engine.gguf, session.engine.config
    if not gguf.tensors:
        raise TreadleError("the model is closed")
    numbers: list[Any] = [(config.arch.name, config.arch.rope)]
    for field in fields(config):
        if field.name not in ("arch", "optional", "ignored", "n_ctx_train"):
            numbers.append((field.name, getattr(config, field.name)))
    state = hashlib.sha256(repr(numbers).encode())
    for name, tensor in sorted(gguf.tensors.items()):
        state.update(repr((name, tensor.shape, tensor.ggml_type)).encode())
        for array in tensor.arrays:
            raw = array.reshape(-1).view(np.uint8)
            for at in (0, len(raw) // 2, max(0, len(raw) - SAMPLE)):
                state.update(raw[at : at + SAMPLE].tobytes())
    return state.hexdigest()


def load_session(
    path: str | os.PathLike[str], session: Session, make_room: Callable[[int], None]
) -> None:
    """Make ``session``, which is empty, hold what ``save_session`` wrote; ``make_room`` is told how
    many tokens that is before pages are taken.

    Raises FileError, with the byte offset, for a file that is damaged, something else or of another
    model; ContextFullError where its tokens do not fit. The session is of no use then: close it.
    """
    path, seq, cache = file_name(path), session.seq, session.engine.cache
    if path.is_dir():
        raise FileError("is a folder", path=path, expected="a file of Session.save")
    with open_file(path) as file, session.engine.lock:
        _check_about(file, _about(session))
        ids = _read_ids(file, session)
        cache.check_context(len(ids))
        first = _check_pools(file, seq, len(ids))
        make_room(len(ids))
        with interrupts_held():
            cache.extend(seq, ids, first)
        for pool, pages in zip(cache.pools, seq.pages, strict=True):
            rows = [pool.page(page) for page in pages if page != GONE]
            _read(file.tensors[pool.const.name], rows, file.metadata)
        with interrupts_held():
            cache.commit(seq)


def _check_about(file: SafeTensors, expected: dict[str, str]) -> None:
    what = {
        "format": "the file is not of a session",
        "version": "the file is of another version of the format",
        "model": "the file is of another model",
        "kv": "the file holds keys and values of another type",
        "page": "the file's pages are of another size",
    }
    for key, wrong in what.items():
        found = file.metadata.get(key)
        if found != expected[key]:
            raise FileError(
                f"{wrong}: {found!r:.80}",
                path=file.path,
                offset=8,
                where=f"__metadata__.{key}",
                expected=expected[key],
            )


def _read_ids(file: SafeTensors, session: Session) -> list[int]:
    names = {"ids", *(pool.const.name for pool in session.engine.cache.pools)}
    for name in sorted(names ^ file.tensors.keys()):
        what = "is missing" if name in names else "is no part of a session of this model"
        raise FileError(what, path=file.path, offset=8, where=name)
    tensor, n_vocab = file.tensors["ids"], session.engine.config.n_vocab
    if tensor.dtype != IDS or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise _error(tensor, f"{tensor.dtype} of shape {list(tensor.shape)}", f"{IDS} [n]")
    session.engine.cache.check_context(tensor.shape[0])
    ids = np.zeros(tensor.shape[0], "<i4")
    _read(tensor, [ids.view(np.uint8)], file.metadata)
    wrong = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(wrong):
        raise _error(tensor, f"token {ids[wrong[0]]}", f"0 to {n_vocab - 1}", 4 * int(wrong[0]))
    return [int(token) for token in ids]


def _check_pools(file: SafeTensors, seq: Sequence, n: int) -> int:
    """The first page that the window's pool has, once every pool's tensor has the right shape."""
    n_pages, first = -(-n // PAGE), 0
    for pool in seq.cache.pools:
        tensor = file.tensors[pool.const.name]
        least = n_pages - seq.cache.window_start(n) if pool.window else n_pages
        rows = tensor.shape[0] if len(tensor.shape) == 2 else -1
        sound = tensor.dtype == BYTES and least <= rows <= n_pages
        if not sound or tensor.shape[1] != pool.page_bytes:
            count = str(n_pages) if least == n_pages else f"{least} to {n_pages}"
            found = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise _error(tensor, found, f"{BYTES} [{count}, {pool.page_bytes}]")
        first = n_pages - rows if pool.window else first
    return first


def _read(tensor: SafeTensor, rows: Iterable[Octets], about: dict[str, str]) -> None:
    """Fill ``rows`` with the tensor's bytes. Read, not mapped: a file that shrinks is an error."""
    state = hashlib.sha256()
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            for row in rows:
                if file.readinto(row.data) != len(row):
                    raise _error(tensor, "cut short", f"{tensor.n_bytes} bytes")
                state.update(row.data)
    except OSError as error:
        raise _error(tensor, f"cannot be read: {why(error)}", "its bytes") from error
    if about.get(f"sha256.{tensor.name}") != state.hexdigest():
        raise _error(tensor, "the bytes are not those that were written", "those of its sha256")


def _error(tensor: SafeTensor, what: str, expected: str, at: int = 0) -> FileError:
    where = tensor.name
    return FileError(
        what, path=tensor.path, offset=tensor.offset + at, where=where, expected=expected
    )
