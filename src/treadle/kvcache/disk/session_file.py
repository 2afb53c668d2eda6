"""Session files: a session's tokens, keys and values as safetensors.

::

    __metadata__   format, version: what the file is; treadle: the version that wrote it
                   model: a fingerprint of the model; kv, page: type and page size
                   sha256.NAME: of each tensor's bytes
                   lora: adapters and control vectors of the session, [{name, mark, scale}] as
                   JSON, with a kind, "control vector", for these; from version 3 on
                   media: its pictures and sounds (``kvcache/media.py``) as JSON; version 4 only
    ids            I32 [n]             the tokens
    kv_global      U8 [pages, bytes]   pages of the full-attention layers
    kv_local       U8 [pages, bytes]   of the layers with a window, the last pages only
    mamba2         U8 [1, bytes]       states of recurrent layers, one name for each kind

A page has the layout of ``kernels/attention/page_layout.py``, with the layers of its pool one after
another. In the last page, positions without a token of the session are zeroed: they may contain
another request's data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.base.interrupts import interrupts_held
from treadle.base.validate import file_name
from treadle.errors import FileError, TreadleError, why
from treadle.files.safetensors import SafeTensor, SafeTensors, open_file
from treadle.files.target import check_target, new_file
from treadle.kernels.run_state import PAGE
from treadle.kvcache.cache import Sequence
from treadle.kvcache.page_pool import FREED, Pool, StatePool

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.control_vector import ControlVector
    from treadle.models.lora import Adapter

FORMAT = "treadle session"
VERSION = "2"
# format versions of sessions with adapters, and with pictures: older readers refuse the file
ADAPTED = "3"
WITH_MEDIA = "4"
CONTROL_VECTOR = "control vector"
# safetensors types
IDS = "I32"
BYTES = "U8"
# fields of Config that do not change keys and values of text
NOT_OF_KEYS = (
    *("arch", "optional", "factors", "ignored", "n_ctx_train", "media", "with_media"),
    "residual_scale",  # epsilons and the embeddings' scale tell it
)
SAMPLE = 64  # bytes of each tensor, at start, middle and end, in the fingerprint
Octets = np.ndarray  # uint8


@dataclass(frozen=True)
class SessionTensor:
    """One tensor to write. ``pieces`` returns its bytes in pieces, each of one page."""

    dtype: str
    shape: list[int]
    n_bytes: int
    pieces: Callable[[], Iterable[Octets]]

    def digest(self) -> str:
        state = hashlib.sha256()
        for piece in self.pieces():
            state.update(piece.data)
        return state.hexdigest()


def save_session(
    path: str | os.PathLike[str], engine: Engine, seq: Sequence, mode: int = 0o666
) -> None:
    """Write a session file atomically. ``mode``: its permissions, limited by the process's umask.

    Raises FileError if it cannot be written, or would replace a file of the model.
    """
    path = file_name(path)
    check_target(path, engine.gguf.paths, force=True)
    with engine.lock, new_file(path, mode=mode) as file:
        tensors = _tensors_of(seq)
        file.write(build_header(_text_metadata(engine, seq), tensors))
        for tensor in tensors.values():
            for piece in tensor.pieces():
                file.write(piece.data)


def _tensors_of(seq: Sequence) -> dict[str, SessionTensor]:
    ids = np.array(seq.ids, "<i4")
    tensors = {"ids": SessionTensor(IDS, [len(ids)], ids.nbytes, lambda: [ids.view(np.uint8)])}
    for pool, pages in _paged(seq):
        gone = [at for at, page in enumerate(pages) if page == FREED]
        held = list(pages[gone[-1] + 1 :] if gone else pages)
        shape = [len(held), pool.cell_bytes]
        pieces = partial(_pieces, pool, held, len(ids) % PAGE)
        tensors[pool.const.name] = SessionTensor(BYTES, shape, shape[0] * shape[1], pieces)
    for states in seq.cache.states:
        pieces = partial(_state, states, seq.slots[0])
        tensors[states.const.name] = SessionTensor(
            BYTES, [1, states.cell_bytes], states.cell_bytes, pieces
        )
    return tensors


def _paged(seq: Sequence) -> list[tuple[Pool, Seq[int]]]:
    """Return the pools that have layers, each with the sequence's pages."""
    return [both for both in zip(seq.cache.pools, seq.pages, strict=True) if both[0].layers]


def _pieces(pool: Pool, pages: Seq[int], n_last: int) -> Iterator[Octets]:
    """Yield the bytes of ``pages``, page by page. In the last one all but the first ``n_last``
    tokens are zeroed; 0: it is full.
    """
    for page in pages[:-1] if n_last else pages:
        yield pool.read(page)
    if n_last:
        last = pool.read(pages[-1]).copy()
        pool.layout.blank(last, n_last)
        yield last


def _state(states: StatePool, slot: int) -> Iterator[Octets]:
    yield states.read(slot)


def build_header(about: dict[str, str], tensors: dict[str, SessionTensor]) -> bytes:
    """Return a safetensors header of these tensors, with a digest of each one's bytes. ``about``:
    further metadata.
    """
    about = about | {f"sha256.{name}": tensor.digest() for name, tensor in tensors.items()}
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.n_bytes]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def session_metadata(engine: Engine, kind: str = FORMAT, version: str = VERSION) -> dict[str, str]:
    """Return the metadata by key that a file must have to fit this engine's model and cache.
    ``kind``, ``version``: the file format's name and version.
    """
    return {
        "format": kind,
        "version": version,
        "treadle": __version__,
        "model": _fingerprint(engine),
        "kv": engine.cache.kv,
        "page": str(PAGE),
    }


def _text_metadata(engine: Engine, seq: Sequence) -> dict[str, str]:
    """Return the metadata of a session's file: the model's, and the session's adapters, control
    vectors, pictures and sounds.
    """
    about = _lora_metadata(engine, seq) if seq.lora else session_metadata(engine)
    media = engine.media.describe(seq.ids)
    return about | {"version": WITH_MEDIA, "media": media} if media else about


def _lora_metadata(engine: Engine, seq: Sequence) -> dict[str, str]:
    loaded: list[Adapter | ControlVector] = [*engine.adapters, *engine.control_vectors]
    each = ((loaded[i], scale) for i, scale in seq.lora)
    lora = [{"name": a.name, "mark": a.mark.hex(), "scale": scale} for a, scale in each]
    n_adapters = len(engine.adapters)
    for entry, (i, _) in zip(lora, seq.lora, strict=True):
        if i >= n_adapters:
            entry["kind"] = CONTROL_VECTOR
    return session_metadata(engine, version=ADAPTED) | {"lora": json.dumps(lora)}


def _fingerprint(engine: Engine) -> str:
    """Return a digest of all that keys and values depend on: the hyper-parameters, and the tensors'
    names, shapes, types and some of their bytes. Reading all bytes of a large model would take
    seconds. Raises TreadleError if the model is closed.
    """
    gguf = engine.gguf
    config = engine.config
    if not gguf.tensors:
        raise TreadleError("the model is closed")
    numbers: list[Any] = [(config.arch.name, config.arch.rope)]
    for field in fields(config):
        if field.name not in NOT_OF_KEYS:
            numbers.append((field.name, getattr(config, field.name)))
    # the set of rope factors that rotated the keys
    numbers += (rope.factors_in(engine.n_ctx) for rope in config.ropes if rope.long_factors)
    state = hashlib.sha256(repr(numbers).encode())
    for name, tensor in sorted(gguf.tensors.items()):
        state.update(repr((name, tensor.shape, tensor.ggml_type)).encode())
        for array in tensor.arrays:
            raw = array.reshape(-1).view(np.uint8)
            for at in (0, len(raw) // 2, max(0, len(raw) - SAMPLE)):
                state.update(raw[at : at + SAMPLE].tobytes())
    return state.hexdigest()


def load_session(
    path: str | os.PathLike[str], engine: Engine, seq: Sequence, make_room: Callable[[int], None]
) -> None:
    """Load a session file into the empty sequence ``seq``. ``make_room(n)`` is called with the
    number of tokens before pages are taken.

    Raises FileError, with the byte offset, for a file that is damaged, not a session, or of another
    model; ContextFullError if its tokens do not fit. ``seq`` is closed after an error.
    """
    try:
        _load(file_name(path), engine, seq, make_room)
    except BaseException:
        with engine.lock, interrupts_held():
            seq.close()
        raise


def _load(path: Path, engine: Engine, seq: Sequence, make_room: Callable[[int], None]) -> None:
    cache = engine.cache
    if path.is_dir():
        raise FileError("is a folder", path=path, expected="a file of Session.save")
    with open_file(path) as file, engine.lock:
        version = ADAPTED if "lora" in file.metadata else VERSION
        version = WITH_MEDIA if "media" in file.metadata else version
        _check_about(file, session_metadata(engine, version=version))
        seq.lora = _read_lora(file, engine)
        ids = _read_ids(file, engine, seq)
        cache.check_context(len(ids))
        first = _check_pools(file, seq, len(ids))
        make_room(len(ids))
        with interrupts_held():
            cache.extend(seq, ids, first)
        for pool, pages in _paged(seq):
            held = iter([page for page in pages if page != FREED])
            for data in _read(file.tensors[pool.const.name], pool.cell_bytes, file.metadata):
                pool.write(next(held), data)
        for states in cache.states:
            for data in _read(file.tensors[states.const.name], states.cell_bytes, file.metadata):
                states.write(seq.slots[1], data)
        with interrupts_held():
            cache.commit(seq)


def _check_about(file: SafeTensors, expected: dict[str, str]) -> None:
    what = {
        "format": "not a session file",
        "version": "the file has another format version",
        "model": "the file was saved with another model",
        "kv": "the file has another KV cache format",
        "page": "the file has another page size",
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


def _read_lora(file: SafeTensors, engine: Engine) -> Lora:
    """Return the session's adapters and control vectors, by their index in this model. Raises
    FileError if the metadata is damaged, or if one of them is not loaded.
    """
    if "lora" not in file.metadata:
        return ()
    found: dict[int, float] = {}
    marks = [mark.hex() for mark in engine.cache.tree.marks]
    where: dict[str, Any] = {"path": file.path, "offset": 8, "where": "__metadata__.lora"}
    try:
        given = [
            (str(each["name"]), str(each["mark"]), float(each["scale"]), each.get("kind"))
            for each in json.loads(file.metadata["lora"])
        ]
        if not all(abs(scale) <= np.finfo(np.float32).max for _, _, scale, _ in given):
            raise ValueError("a scale that float32 cannot represent")
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        ValueError,
        RecursionError,
    ) as error:
        expected = "a list of adapters, each with name, mark and scale"
        raise FileError("is damaged", expected=expected, **where) from error
    for name, mark, scale, kind in given:
        at = [i for i, own in enumerate(marks) if own == mark and i not in found]
        if not at:
            what, option = "adapter", "lora=, --lora"
            if kind == CONTROL_VECTOR:
                what, option = CONTROL_VECTOR, "control_vectors=, --control-vector"
            what = f"the session used the {what} {name!r:.80}, but no such {what} is loaded"
            raise FileError(what, expected=f"a model loaded with it ({option})", **where)
        found[at[0]] = scale
    return tuple(sorted(found.items()))


def _read_ids(file: SafeTensors, engine: Engine, seq: Sequence) -> list[int]:
    names = {"ids", *(pool.const.name for pool, _ in _paged(seq))}
    names |= {states.const.name for states in seq.cache.states}
    for name in sorted(names ^ file.tensors.keys()):
        what = "is missing" if name in names else "does not belong to a session of this model"
        raise FileError(what, path=file.path, offset=8, where=name)
    tensor = file.tensors["ids"]
    n_vocab = engine.config.n_vocab
    media = engine.media
    if tensor.dtype != IDS or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise _error(tensor, f"{tensor.dtype} of shape {list(tensor.shape)}", f"{IDS} [n]")
    engine.cache.check_context(tensor.shape[0])
    (raw,) = _read(tensor, tensor.n_bytes, file.metadata)
    ids = raw.view("<i4")
    of_text = (ids >= 0) & (ids < n_vocab)
    wrong = np.flatnonzero(~(of_text | (ids >= media.first_id)))
    if len(wrong):
        raise _error(tensor, f"token {ids[wrong[0]]}", f"0 to {n_vocab - 1}", 4 * int(wrong[0]))
    try:
        text = file.metadata.get("media", "")
        return media.restore(text, [int(token) for token in ids], engine.cache.tree)
    except ValueError as error:
        where = "__metadata__.media"
        raise FileError(str(error), path=file.path, offset=8, where=where) from error


def _check_pools(file: SafeTensors, seq: Sequence, n: int) -> list[int]:
    """Check the shapes of the tensors with pages and states of a session of ``n`` tokens. Return,
    per pool, the index of the first stored page. Raises FileError.
    """
    n_pages = -(-n // PAGE)
    first = [0] * len(seq.pages)
    for pool, _ in _paged(seq):
        tensor = file.tensors[pool.const.name]
        least = n_pages - pool.first_seen(n)
        rows = tensor.shape[0] if len(tensor.shape) == 2 else -1
        sound = tensor.dtype == BYTES and least <= rows <= n_pages
        if not sound or tensor.shape[1] != pool.cell_bytes:
            count = str(n_pages) if least == n_pages else f"{least} to {n_pages}"
            found = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise _error(tensor, found, f"{BYTES} [{count}, {pool.cell_bytes}]")
        first[pool.index] = n_pages - rows
    for states in seq.cache.states:
        tensor = file.tensors[states.const.name]
        shape = (1, states.cell_bytes)
        if tensor.dtype != BYTES or tuple(tensor.shape) != shape:
            found = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise _error(tensor, found, f"{BYTES} {list(shape)}")
    return first


def _read(tensor: SafeTensor, size: int, about: dict[str, str]) -> Iterator[Octets]:
    """Yield a tensor's bytes, ``size`` at a time, and compare its digest at the end with the one in
    ``about``, the file's metadata. The file is read, not mapped, so that a file which shrinks
    meanwhile raises FileError.
    """
    state = hashlib.sha256()
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            for _ in range(0, tensor.n_bytes, size):
                piece = file.read(size)
                if len(piece) != size:
                    raise _error(tensor, "cut short", f"{tensor.n_bytes} bytes")
                state.update(piece)
                yield np.frombuffer(piece, np.uint8)
    except OSError as error:
        raise _error(tensor, f"cannot be read: {why(error)}", "its bytes") from error
    if about.get(f"sha256.{tensor.name}") != state.hexdigest():
        raise _error(tensor, "the checksum does not match", "the stored sha256")


def _error(tensor: SafeTensor, what: str, expected: str, at: int = 0) -> FileError:
    return tensor.error(what, expected, offset=tensor.offset + at)
