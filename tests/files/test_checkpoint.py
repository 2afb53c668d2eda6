"""PyTorch checkpoints: what torch.save writes is read as it is, and nothing of it is ever run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.checkpoint import STORAGES, Checkpoint

torch = pytest.importorskip("torch")


def save(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(6, 10, generator=generator)
    return {
        "f32": base,
        "f16": base.half(),
        "bf16": base.bfloat16(),
        "f64": base.double(),
        "i64": torch.arange(5),
        "i8": torch.arange(-3, 4, dtype=torch.int8),
        "a slice of f32": base[2:4],
        "columns": base[:, 3:7],
        "transposed": base.t(),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base[:2].clone()),
    }


def as_bytes(tensor: Any) -> bytes:
    whole: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return whole


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saved(tmp_path: Path, protocol: int) -> None:
    wanted = tensors()
    made = Checkpoint(save(tmp_path / "x.pth", wanted, pickle_protocol=protocol))
    assert list(made.tensors) == list(wanted)
    for name, tensor in made.tensors.items():
        assert tensor.shape == tuple(wanted[name].shape), name
        assert tensor.data.tobytes() == as_bytes(wanted[name]), name
        assert STORAGES[f"{tensor.kind}Storage"].n_bytes == wanted[name].element_size()
    for name in ("f32", "bf16", "a slice of f32", "parameter"):
        assert np.shares_memory(made.tensors[name].data, made.file), name
    assert not np.shares_memory(made.tensors["columns"].data, made.file)


def test_the_state_of_a_module(tmp_path: Path) -> None:
    """An OrderedDict with torch's ``_metadata`` set on it."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    made = Checkpoint(save(tmp_path / "x.pth", state))
    assert list(made.tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert made.tensors["0.weight"].data.tobytes() == as_bytes(state["0.weight"])


# -- code in the pickle ---------------------------------------------------------------------------


def touch(path: str) -> bytes:
    return b"".join(
        (b"\x8c", bytes([len(path)]), path.encode())
    )  # SHORT_BINUNICODE: the argument of os.mkdir


ATTACKS: dict[str, Callable[[str], bytes]] = {
    "GLOBAL and REDUCE": lambda p: b"cos\nmkdir\n" + touch(p) + b"\x85R.",
    "STACK_GLOBAL": lambda p: b"\x8c\x02os\x8c\x05mkdir\x93" + touch(p) + b"\x85R.",
    "INST": lambda p: b"(" + touch(p) + b"ios\nmkdir\n.",
    "OBJ": lambda p: b"(cos\nmkdir\n" + touch(p) + b"o.",
    "builtins": lambda p: (
        b"cbuiltins\neval\n" + touch(f"__import__('os').mkdir({p!r})") + b"\x85R."
    ),
    "a dotted name": lambda p: b"\x8c\x02os\x8c\x0dpath.os.mkdir\x93" + touch(p) + b"\x85R.",
}
# These need more than one opcode that is refused, or classes that are not there: only refused.
REFUSED = {
    "NEWOBJ": b"cos\nmkdir\n)\x81.",
    "NEWOBJ_EX": b"cos\nmkdir\n)}\x92.",
    "EXT1": b"\x82\x01.",
    "PERSID": b"Pwhatever\n.",
    "BUILD on a list": b"]}b.",
    "call of a class of storages": b"ctorch\nFloatStorage\n)R.",
    "call of a string": b"\x8c\x02os)R.",
    "another name of torch._utils": b"ctorch._utils\n_import_dotted_name\n\x8c\x02os\x85R.",
    "torch.load": b"ctorch\nload\n\x8c\x02os\x85R.",
    "OrderedDict of something": b"ccollections\nOrderedDict\n](K\x01K\x02e\x85R.",
    "a storage that is none": b"\x8c\x07storage\x85Q.",
    "a key that is a tuple": b"})K\x01s.",
    "an empty memo": b"h\x05.",
    "an empty stack": b"R.",
    "no end": b"}",
    "nothing": b"",
    "cut short": b"\x8c\xff",
}


def archive(path: Path, raw: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", raw)
        for name, data in members.items():
            out.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("which", ATTACKS)
def test_code_is_never_run(tmp_path: Path, which: str) -> None:
    trap = tmp_path / "trap"
    raw = b"\x80\x04" + ATTACKS[which](str(trap))
    path = archive(tmp_path / "x.pth", raw)
    with pytest.raises(FileError, match=r"x\.pth: archive/data\.pkl: pickle byte"):
        Checkpoint(path)
    assert not trap.exists()
    pickle.loads(raw)  # the attack is real: Python's own reader falls for it
    assert trap.exists()


@pytest.mark.parametrize("which", REFUSED)
def test_what_no_tensor_needs_is_refused(tmp_path: Path, which: str) -> None:
    path = archive(tmp_path / "x.pth", b"\x80\x04" + REFUSED[which])
    with pytest.raises(FileError, match=r"archive/data\.pkl"):
        Checkpoint(path)


def test_a_value_nested_in_itself_by_the_memo_costs_nothing(tmp_path: Path) -> None:
    """Each tuple holds the one before twice: 2**200 leaves, were they ever walked."""
    raw = b"\x80\x04)\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(200))
    for end in (b".", b"}\x8c\x01ah\xc7s.", b"}h\xc7K\x00s."):  # alone, as a value, as a key
        with pytest.raises(FileError):
            Checkpoint(archive(tmp_path / "x.pth", raw + end))


# -- archives that are not what they say -------------------------------------------------------


def repack(
    source: Path, target: Path, change: Callable[[str, bytes], bytes | None], how: int
) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


def test_damaged_archives(tmp_path: Path) -> None:
    good = save(tmp_path / "good.pth", {"w": torch.ones(64, 64)})
    bad = tmp_path / "bad.pth"

    def refused(match: str, change: Callable[[str, bytes], bytes | None], how: int = 0) -> None:
        with pytest.raises(TreadleError, match=match) as caught:
            Checkpoint(repack(good, bad, change, how))
        assert "bad.pth" in str(caught.value)

    refused("compressed", lambda n, d: d, zipfile.ZIP_DEFLATED)
    refused("w: reaches beyond its storage", lambda n, d: d[:-4] if n.endswith("data/0") else d)
    refused("w: its storage '0' is not", lambda n, d: None if n.endswith("data/0") else d)
    refused(r"no data\.pkl", lambda n, d: None if n.endswith("data.pkl") else d)
    refused("big-endian", lambda n, d: b"big" if n.endswith("byteorder") else d)
    raw = good.read_bytes()
    for n in (0, 3, 4, 100, len(raw) // 2, len(raw) - 1):
        bad.write_bytes(raw[:n])
        with pytest.raises(TreadleError, match=r"bad\.pth"):
            Checkpoint(bad)
    at = raw.index(b"PK\x01\x02")  # the central directory; the first member's header moves away
    bad.write_bytes(raw[: at + 42] + b"\xff\xff\x00\x00" + raw[at + 46 :])
    with pytest.raises(FileError, match="bad"):
        Checkpoint(bad)


def test_other_contents(tmp_path: Path) -> None:
    for value, match in (
        ({"a": {"b": torch.ones(2)}}, "'a': is a dict"),
        ([torch.ones(2)], "describes a list"),
        ({"a": torch.ones(1).expand(1000)}, "a: shape .* repeats"),
        ({"a": torch.ones(3).as_strided((2, 2), (1, 1))}, "a: shape .* repeats"),
        ({"a": torch.ones(0, 3)}, "a: shape .* no elements"),
        ({"a": 5}, "'a': is a int"),
    ):
        with pytest.raises(FileError, match=match):
            Checkpoint(save(tmp_path / "x.pth", value))
    old = tmp_path / "old.pth"
    torch.save({"a": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        Checkpoint(old)


@pytest.fixture(scope="module")
def whole() -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.ones(3, 4), "b": torch.zeros(4).half()}, out)
    return out.getvalue()


def test_a_strange_escape_is_no_warning(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pth", b"S'\\o'\n.")
    with pytest.raises(FileError, match=r"x\.pth"):
        Checkpoint(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_is_an_error_or_harmless(whole: bytes, tmp_path: Path, data: Any) -> None:
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f"{os.getpid()}.pth"
    path.write_bytes(raw)
    said = str(path)
    try:
        for tensor in Checkpoint(path).tensors.values():
            assert len(tensor.data) <= len(raw)
    except TreadleError as error:
        said = str(error)
    assert str(path) in said
