"""GGUF files put together byte by byte, so that tests can make them wrong in one place."""

from __future__ import annotations

import struct
from collections.abc import Sequence

STRING = 8
ARRAY = 9
U32 = 4


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def kv(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def strings(key: bytes, items: Sequence[bytes]) -> bytes:
    head = struct.pack("<IQ", STRING, len(items))
    return kv(key, ARRAY, head + b"".join(map(string, items)))


def info(name: bytes, dims: Sequence[int], ggml_type: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", ggml_type, offset)


def gguf(
    kvs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    header = magic + struct.pack("<IQQ", version, len(infos), len(kvs))
    header += b"".join(kvs) + b"".join(infos)
    if infos and data:
        header += bytes(-len(header) % alignment)
    return header + data
