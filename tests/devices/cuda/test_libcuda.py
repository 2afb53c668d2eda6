"""NVIDIA's driver by ctypes, against a fake with the same C signatures, and against cuda.h."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.devices.cuda.fake_cuda import FakeCuda
from treadle.devices.cuda import library
from treadle.devices.cuda.driver import Launch, Upload
from treadle.devices.cuda.libcuda import CudaDriver
from treadle.devices.cuda.library import CONSTANTS, SIGNATURES, Library
from treadle.errors import DeviceError, NoMemoryError
from treadle.jit.kernel import CompileStats, symbol
from treadle.kernels.attention.merge_splits import Merge

SPEC = Merge(1, 1, 1, 32, 0)
CODE = f".entry {symbol(SPEC)}".encode()


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.broken == []


@pytest.fixture
def driver(fake: FakeCuda) -> Iterator[CudaDriver]:
    made = CudaDriver(0, Library(fake))
    yield made
    fake.fails.clear()
    made.close()
    assert not fake.kept


def refusal(fake: FakeCuda, ordinal: int = 0) -> str:
    with pytest.raises(DeviceError) as caught:
        CudaDriver(ordinal, Library(fake))
    assert not fake.kept
    assert not fake.broken
    return str(caught.value)


# -- the signatures -----------------------------------------------------------------------------

C_TYPES = {
    "unsignedint": ctypes.c_uint,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "unsignedchar": ctypes.c_ubyte,
    "unsignedlonglong": ctypes.c_ulonglong,
    "CUdeviceptr": ctypes.c_ulonglong,
    "float": ctypes.c_float,
    "char": ctypes.c_char,
    "void": None,
    **dict.fromkeys(("CUdevice", "CUdevice_attribute", "CUfunction_attribute"), ctypes.c_int),
    **dict.fromkeys(("CUresult", "CUjit_option", "CUstreamCaptureMode"), ctypes.c_int),
}


def ctype(text: str) -> Any:
    """Of a parameter as C writes it, its name at the end."""
    text = text.strip()
    found = re.fullmatch(r"(?:const )?([\w ]+?) ?(\**) ?\w+(\[\])?", text)
    assert found, text
    name = found[1].replace(" ", "")
    stars = len(found[2]) + bool(found[3])
    kind: Any = C_TYPES.get(name, ctypes.c_void_p)  # a handle
    for i in range(stars):
        if kind is None:
            kind = ctypes.c_void_p
        elif kind is ctypes.c_char and i == 0 and text.startswith("const"):
            kind = ctypes.c_char_p
        else:
            kind = ctypes.POINTER(kind)
    return kind


def header() -> str:
    """cuda.h of the compiler that tests are made with."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(root).glob("*/include/cuda.h")):
            return re.sub(r"/\*.*?\*/", "", path.read_text("utf-8", "replace"), flags=re.DOTALL)
    if os.environ.get("CI") == "true":
        pytest.fail("cuda.h is absent under CI: the extra 'dev' has it")
    pytest.skip("cuda.h is absent: install the extra 'dev'")


@pytest.mark.slow  # the header comes with the extra dev
def test_signatures_are_those_of_the_header() -> None:
    text = header()
    for name, types in SIGNATURES.items():
        stem = name.partition("_v2")[0].removesuffix("WithFlags")
        prototype = re.search(rf"CUresult CUDAAPI {stem}\(([^)]*)\);", text)
        assert prototype, name
        expected = [ctype(part) for part in " ".join(prototype[1].split()).split(",")]
        assert list(types) == expected, (name, prototype[1])
        # What a program that is compiled with this header calls, unless it asks for a stream each.
        versions = re.findall(rf"#define +{stem} +(?:__CUDA_API_\w+\()?(\w+)", text)
        assert stem == name or name in versions or not versions, (name, versions)


@pytest.mark.slow  # cuda.h is in the extra dev
def test_constants_are_those_of_the_header() -> None:
    text = header()
    for name, value in CONSTANTS.items():
        found = re.search(rf"\b{name} *= *(0x[0-9a-fA-F]+|\d+)", text)
        assert found, name
        assert int(found[1], 0) == value, name


# -- what is refused ----------------------------------------------------------------------------


def test_no_driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NAMES", ("libno-such.so.1", "no-such.dll"))
    with pytest.raises(DeviceError, match=r"cannot load libno-such\.so\.1 or no-such\.dll"):
        CudaDriver()


def test_a_driver_without_one_of_the_functions() -> None:
    with pytest.raises(DeviceError, match="too old: it lacks cuGraphLaunch"):
        Library(FakeCuda(without="cuGraphLaunch"))


def test_no_card() -> None:
    fake = FakeCuda()
    fake.fails["cuInit"] = CONSTANTS["CUDA_ERROR_NO_DEVICE"]
    assert refusal(fake) == (
        "the GPU driver finds no usable GPU (check CUDA_VISIBLE_DEVICES, or the container's --gpus)"
    )
    fake.fails["cuInit"] = 3
    assert refusal(fake) == "the GPU driver: words of the driver (in cuInit)"
    assert refusal(FakeCuda(count=2), 2) == "no GPU 2: this process can use 2, numbered from 0"
    old = refusal(FakeCuda(capability=(7, 5)))
    assert old == "Fake 9000: compute capability 7.5, expected 8.0 or newer"


def test_what_is_half_open_is_given_back() -> None:
    fake = FakeCuda()
    fake.fails["cuStreamCreate"] = 1
    assert "cuStreamCreate" in refusal(fake)


# -- what a card is -----------------------------------------------------------------------------


def test_opening(fake: FakeCuda, driver: CudaDriver) -> None:
    assert fake.calls[:2] == ["cuInit", "cuDriverGetVersion"]
    assert fake.calls[-3:] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate"]
    assert driver.facts == ("Fake 9000", 1 << 28, 4, (9, 0), (12, 4), 227 << 10)
    assert driver.isa.triple.startswith("nvptx64")
    assert driver.isa.simt is not None
    assert fake.kept == {"stream": 1, "context": 1}


def test_memory(fake: FakeCuda, driver: CudaDriver) -> None:
    data = np.arange(100, dtype=np.uint8)
    a = driver.alloc(100)
    b = driver.alloc(50)
    driver.write(a, data)
    driver.copy(b, a + 10, 50)
    assert np.array_equal(driver.read(b, 50), data[10:60])
    driver.clear(b + 10, 5)
    assert driver.read(b + 9, 7).tolist() == [19, 0, 0, 0, 0, 0, 25]
    driver.write(b, data[::2])  # what does not lie together is laid together
    assert np.array_equal(driver.read(b, 50), data[::2])
    assert driver.memory_info() == ((1 << 28) - 150, 1 << 28)
    assert driver.read(driver.alloc(0), 0).size == 0
    driver.free(a)
    driver.free(a)  # once
    pinned = driver.pinned(64)
    assert not pinned.any()
    assert fake.kept["host"] == 1
    driver.unpin(pinned)
    driver.unpin(pinned)
    assert fake.kept == {"memory": 2, "stream": 1, "context": 1}


def test_out_of_memory(driver: CudaDriver) -> None:
    driver.alloc(200 << 20)
    with pytest.raises(NoMemoryError) as caught:
        driver.alloc(100 << 20)
    needed = "out of GPU memory: 100 MiB needed in one block"
    text = f"{needed}; Fake 9000 has 56.0 MiB free of 256 MiB"
    assert str(caught.value) == text


# -- kernels ------------------------------------------------------------------------------------


def test_a_kernel_is_loaded(fake: FakeCuda, driver: CudaDriver) -> None:
    kernel = driver.load(SPEC, CODE)
    assert fake.ptx == [CODE]  # with a NUL behind it
    assert fake.held[(kernel.value or 0) - 1] == "module"


def test_a_driver_too_old_for_the_ptx(fake: FakeCuda, driver: CudaDriver) -> None:
    fake.fails["cuModuleLoadDataEx"] = CONSTANTS["CUDA_ERROR_UNSUPPORTED_PTX_VERSION"]
    with pytest.raises(DeviceError, match=r"Fake 9000: its driver \(CUDA 12\.4\) is too old for"):
        driver.load(SPEC, CODE)


def test_a_kernel_that_is_refused(fake: FakeCuda, driver: CudaDriver) -> None:
    def load(out: Any, image: Any, n: Any, options: Any, values: Any) -> int:
        ctypes.memmove(values[0], b"ptxas: line 3\0", 14)
        return 218

    types = SIGNATURES["cuModuleLoadDataEx"]
    function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(load)
    found = SimpleNamespace(**{name: getattr(fake, name) for name in SIGNATURES})
    found.cuModuleLoadDataEx = function
    other = CudaDriver(0, Library(found))
    with pytest.raises(DeviceError, match=f"rejected the kernel {SPEC.name}(.|\n)*ptxas: line 3"):
        other.load(SPEC, CODE)
    other.close()


def test_a_graph(fake: FakeCuda, driver: CudaDriver) -> None:
    kernel = driver.load(SPEC, CODE)
    there = driver.alloc(16)
    upload = Upload(there, driver.pinned(16))
    small = Launch(kernel, 3, 64, 1024, 1 << 40, 2, 0, 4, 5, 6)
    large = small._replace(blocks=1, shared=100 << 10, base=9)
    graph = driver.graph(upload, [small, large])
    assert fake.launched == []
    assert fake.kept["recorded"] == 0
    assert fake.kept["graph"] == 1
    for i in (1, 2):
        upload.data[:] = i
        driver.start(graph)
        assert driver.read(there, 16).tolist() == [i] * 16
    first = kernel.value, 3, 1, 1, 64, 1, 1, 1024, 1 << 40, 2, 0, 4, 5, 6
    second = kernel.value, 1, 1, 1, 64, 1, 1, 100 << 10, 1 << 40, 2, 0, 9, 5, 6
    assert fake.launched == [first, second] * 2
    assert fake.asked_shared == {kernel.value: 100 << 10}
    driver.drop(graph)
    assert fake.kept["graph"] == 0


def test_a_recording_that_fails_ends(fake: FakeCuda, driver: CudaDriver) -> None:
    kernel = driver.load(SPEC, CODE)
    upload = Upload(driver.alloc(16), driver.pinned(16))
    launch = Launch(kernel, 1, 32, 0, 1, 2, 3, 4, 5, 6)
    fake.fails["cuLaunchKernel"] = 1
    with pytest.raises(DeviceError, match="cuLaunchKernel"):
        driver.graph(upload, [launch])
    fake.fails.clear()
    assert "recorded" not in fake.kept
    driver.wait()  # the stream does again what it is told
    driver.start(driver.graph(upload, [launch]))
    assert len(fake.launched) == 1


def test_times_are_those_of_events(fake: FakeCuda, driver: CudaDriver) -> None:
    kernel = driver.load(SPEC, CODE)
    upload = Upload(driver.alloc(16), driver.pinned(16))
    launch = Launch(kernel, 1, 32, 0, 1, 2, 3, 4, 5, 6)
    times = driver.timed(upload, [launch] * 3)
    assert times == pytest.approx([0.016] * 3)  # the fake's events are 16 apart
    assert len(fake.launched) == 3
    assert fake.kept["event"] == 0
    fake.fails["cuEventElapsedTime"] = 1
    with pytest.raises(DeviceError):
        driver.timed(upload, [launch])
    assert fake.kept["event"] == 0


# -- threads, processes, the end ----------------------------------------------------------------


def test_any_thread_may_ask(driver: CudaDriver) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(driver.read(driver.alloc(8), 8).size))
    thread.start()
    thread.join()
    assert found == [8]


def test_a_forked_child_is_refused(
    fake: FakeCuda, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = driver.alloc(8)
    n = len(fake.calls) + 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(DeviceError, match="a forked process"):
            driver.read(at, 8)
        driver.free(at)  # its parent's
        driver.close()
        assert len(fake.calls) == n
    assert driver.read(at, 8).size == 8


def test_all_is_given_back_though_the_card_has_failed(fake: FakeCuda) -> None:
    driver = CudaDriver(0, Library(fake))
    graph = driver.graph(Upload(driver.alloc(8), driver.pinned(8)), [])
    driver.load(SPEC, CODE)
    fake.fails["cuStreamSynchronize"] = 700
    with pytest.raises(DeviceError, match="words of the driver"):
        driver.wait()
    driver.close()
    assert not fake.kept
    n = len(fake.calls)
    driver.close()
    driver.drop(graph)
    driver.free(1)
    assert len(fake.calls) == n
    with pytest.raises(DeviceError, match="the model is closed"):
        driver.alloc(1)


def test_code_is_ptx(driver: CudaDriver) -> None:
    tally = CompileStats()
    code = driver.code(SPEC, tally)
    assert f".entry {symbol(SPEC)}(".encode() in code
    assert tally.n_compiled + tally.n_cached == 1
