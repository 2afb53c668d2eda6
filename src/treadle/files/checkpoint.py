"""Reader of PyTorch checkpoints (``.pth``, ``.pt``, ``.bin``): mapped, and no pickle code is run.

::

    a zip archive, nothing compressed:
    NAME/data.pkl    a pickle: tensors by name, each a view of a storage
    NAME/data/KEY    the bytes of storage KEY
    NAME/byteorder   "little", if present

The pickle is read by ``files/pickles.py``, which imports nothing and calls only the functions
below. Storages are located by their members' offsets and stay in the file.
"""

from __future__ import annotations

import math
import struct
import zipfile
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import UnsupportedError, why
from treadle.files.pickles import MAX_BYTES, Name, load_pickle
from treadle.files.reader import MappedReader
from treadle.files.tensor import TensorData

Bytes = npt.NDArray[np.uint8]

ZIP_MAGIC = b"PK\x03\x04"
LOCAL_HEADER = 30  # bytes, before the name
MAX_DIMS = 8


class StorageType(NamedTuple):
    """An element type of torch's storages: bytes per element, and the ggml type number (-1 if
    none).
    """

    n_bytes: int
    ggml_type: int


STORAGES: dict[str, StorageType] = {
    "FloatStorage": StorageType(4, 0),
    "HalfStorage": StorageType(2, 1),
    "BFloat16Storage": StorageType(2, 30),
    "DoubleStorage": StorageType(8, 28),
    "CharStorage": StorageType(1, 24),
    "ShortStorage": StorageType(2, 25),
    "IntStorage": StorageType(4, 26),
    "LongStorage": StorageType(8, 27),
    "ByteStorage": StorageType(1, -1),
    "BoolStorage": StorageType(1, -1),
    "ComplexFloatStorage": StorageType(8, -1),
}


class _Storage(NamedTuple):
    kind: str  # a key of STORAGES
    key: str
    n: int  # elements


class _View(NamedTuple):
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements


@dataclass(frozen=True, eq=False)
class CheckpointTensor(TensorData):
    """One tensor of a checkpoint; ``kind`` is torch's element type ("BFloat16"), ``offset`` the
    byte in the file at which the first element begins.
    """

    name: str
    shape: tuple[int, ...]
    kind: str  # a key of STORAGES without "Storage"
    ggml_type: int  # -1: ggml has no such type
    path: Path
    offset: int  # absolute, of the first element
    n_bytes: int  # from the first element to the end of the last
    _elements: npt.NDArray[Any] = field(repr=False)  # [shape], a view with the tensor's strides

    @property
    def data(self) -> Bytes:
        """The elements in row-major order as uint8: a view of the mapped file if the tensor is
        contiguous, else a copy. ``n_bytes`` is the tensor's span in the file, which gaps make
        larger.
        """
        return np.ascontiguousarray(self._elements).reshape(-1).view(np.uint8)


class Checkpoint(MappedReader):
    """The tensors of one checkpoint, by name. Raises FileError for a damaged file, UnsupportedError
    for a file that is no zip archive (PyTorch before 1.6) or big-endian.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a PyTorch checkpoint")
        if self.map[:4] != ZIP_MAGIC:
            raise UnsupportedError(
                f"{path}: not a zip archive: a checkpoint of PyTorch before 1.6 (2020) or another "
                "file; load it with that torch and save it again"
            )
        members = self._members()
        root = self._root(members)
        order = members.get(f"{root}byteorder")
        if order is not None and self._read(order) != b"little":
            raise UnsupportedError(f"{path}: a checkpoint from a big-endian machine")
        described = load_pickle(
            self._read(members[f"{root}data.pkl"]),
            _NAMES,
            _storage,
            path=path,
            where=f"{root}data.pkl",
        )
        self.tensors: dict[str, CheckpointTensor] = {}
        for name, view in self._views(described).items():
            self.tensors[name] = self._place(name, view, members, root)

    # -- the archive ------------------------------------------------------------------------

    def _members(self) -> dict[str, tuple[str, int, int]]:
        """Return (name, offset, size in bytes) of every archive member by name. Raises FileError
        for one that is compressed, encrypted or not within the file.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as e:
            raise self.error(f"is a damaged zip archive: {e}") from None
        except OSError as e:
            raise self.error(f"cannot be read: {why(e)}") from e
        found: dict[str, tuple[str, int, int]] = {}
        for info in infos:
            name = info.filename
            if name in found:
                raise self.error("appears twice in the archive", where=name)
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise self.error(
                    "is compressed or encrypted", where=name, expected="stored, uncompressed data"
                )
            found[name] = (name, self._data_offset(info), info.file_size)
        return found

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        """Return the byte offset in the file at which the data of the archive member ``info``
        begins: after the member's local header, whose lengths may differ from those in the
        archive's directory.
        """
        at = info.header_offset
        head = self.map[at : at + LOCAL_HEADER] if 0 <= at < len(self.file) else b""
        if len(head) < LOCAL_HEADER or head[:4] != ZIP_MAGIC:
            raise self.error("has no local header", offset=max(at, 0), where=info.filename)
        n_name, n_extra = struct.unpack_from("<HH", head, 26)
        start: int = at + LOCAL_HEADER + n_name + n_extra
        end = start + info.file_size
        if info.file_size != info.compress_size or end > len(self.file):
            what = f"cut short: the file has {len(self.file)} bytes"
            raise self.error(what, at, info.filename, str(end))
        return start

    def _root(self, members: dict[str, tuple[str, int, int]]) -> str:
        pickles = [name for name in members if name.split("/")[-1] == "data.pkl"]
        roots = [name.removesuffix("data.pkl") for name in pickles if name.count("/") <= 1]
        if len(roots) != 1:
            what = "has no data.pkl" if not roots else f"has {len(roots)} data.pkl files"
            raise self.error(what, expected="a checkpoint that torch.save wrote")
        return roots[0]

    def _read(self, member: tuple[str, int, int]) -> bytes:
        name, at, n = member
        if n > MAX_BYTES:
            what = f"{n} bytes"
            raise self.error(what, offset=at, where=name, expected=f"at most {MAX_BYTES}")
        return self.map[at : at + n]

    # -- the tensors ------------------------------------------------------------------------

    def _views(self, described: Any) -> dict[str, _View]:
        if type(described) is not dict:
            what = f"describes a {type(described).__name__}"
            raise self.error(what, where="data.pkl", expected="tensors by name")
        for name, view in described.items():
            if type(view) is not _View or type(name) is not str or not name.isprintable():
                what = f"is a {type(view).__name__}"
                expected = "a tensor, as in a checkpoint of weights only"
                raise self.error(what, where=f"{name!r:.100}", expected=expected)
        return described

    def _place(
        self, name: str, view: _View, members: dict[str, tuple[str, int, int]], root: str
    ) -> CheckpointTensor:
        kind = STORAGES[view.storage.kind]
        member = members.get(f"{root}data/{view.storage.key}")
        if member is None:
            what = f"its storage {view.storage.key!r:.60} is not in the archive"
            raise self.error(what, where=name)
        _, start, n_bytes = member
        if 0 in view.shape:
            raise self.error(f"shape {list(view.shape)} has no elements", where=name)
        last = view.offset + sum(
            (n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)
        )
        n_span = (last + 1 - view.offset) * kind.n_bytes
        if (last + 1) * kind.n_bytes > n_bytes:
            what = f"reaches beyond its storage, which has {n_bytes} bytes"
            raise self.error(what, start, name, f"{(last + 1) * kind.n_bytes} bytes")
        # Strides of 0 would let a small file demand a large array.
        if math.prod(view.shape) * kind.n_bytes > n_span:
            what = f"shape {list(view.shape)} repeats the {n_span} bytes of its storage"
            raise self.error(what, start, name, "each element once")
        offset = start + view.offset * kind.n_bytes
        elements: npt.NDArray[Any] = np.ndarray(
            view.shape,
            f"V{kind.n_bytes}",
            self.file.data,
            offset,
            tuple(stride * kind.n_bytes for stride in view.strides),
        )
        return CheckpointTensor(
            name,
            view.shape,
            view.storage.kind.removesuffix("Storage"),
            kind.ggml_type,
            self.path,
            offset,
            n_span,
            elements,
        )


# -- functions that the pickle may call -----------------------------------------------------------


def _storage(pid: Any) -> _Storage:
    """Return the storage that a persistent id of the pickle names: ("storage", class, key, device,
    number of elements). Raises ValueError for any other id.
    """
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise ValueError("a persistent id that is not a storage")
    _, kind, key, _, n = pid
    if type(kind) is not Name or kind.name not in STORAGES:
        raise ValueError("a storage of a type other than numbers")
    if type(key) is not str or type(n) is not int or n < 0:
        raise ValueError("a storage without key and size")
    return _Storage(kind.name, key, n)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _View:
    """Return the tensor that ``torch._utils._rebuild_tensor_v2`` would return for these arguments,
    as a view of the storage that reads nothing yet; ``offset`` and ``stride`` count elements.
    Raises ValueError for invalid sizes or strides.
    """
    if type(storage) is not _Storage:
        raise ValueError("a tensor without storage")
    sizes = (*size, *stride, offset) if type(size) is type(stride) is tuple else (None,)
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in sizes):
        raise ValueError("a tensor whose shape is not a tuple of sizes")
    if len(size) != len(stride) or len(size) > MAX_DIMS:
        raise ValueError(f"a tensor of {len(size)} sizes and {len(stride)} strides")
    return _View(storage, offset, size, stride)


def _rebuild_parameter(data: Any, *_: Any) -> _View:
    if type(data) is not _View:
        raise ValueError("a parameter that is not a tensor")
    return data


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    if items not in ((), []):  # torch fills it afterwards, by SETITEMS
        raise ValueError("an OrderedDict with arguments")
    return {}


_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): _ordered_dict,
    **{("torch", name): None for name in STORAGES},
}
