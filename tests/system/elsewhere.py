"""A program that finds macOS or Windows where it runs.

``python -m tests.system.elsewhere NAME ...`` runs ``treadle ...`` on Linux with what the other
system lacks taken away, and its calls faked: those of ``system/macos.py``,
``system/windows.py`` and ``system/freebsd.py``, by the vendors' documents. The name of each fake
that was called goes, once, into the file that ``TREADLE_CALLS`` names.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import fcntl
import mmap
import os
import platform
import runpy
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

# Libraries read the system in their own way as they are imported: before anything is gone.
PRELOADED: tuple[str, ...] = (
    "asyncio",
    "click",
    "jinja2",
    "llvmlite.binding",
    "multiprocessing",
    "numpy",
)
PRELOADED += ("prompt_toolkit", "rich", "subprocess", "tempfile", "uvicorn", "uvicorn.config")
LACKING = {
    "darwin": {"os": ("O_PATH", "copy_file_range", "memfd_create", "posix_fadvise"), "modules": ()},
    "freebsd": {"os": ("O_PATH", "copy_file_range", "memfd_create"), "modules": ()},
    "win32": {
        "os": (
            "SEEK_DATA",
            "SEEK_HOLE",
            "O_CLOEXEC",
            "O_NOFOLLOW",
            "O_NONBLOCK",
            "chown",
            "copy_file_range",
            "fchmod",
            "fork",
            "getloadavg",
            "getpgrp",
            "geteuid",
            "getuid",
            "killpg",
            "major",
            "memfd_create",
            "minor",
            "posix_fadvise",
            "pread",
            "pwrite",
            "register_at_fork",
            "sched_yield",
            "sysconf",
            "tcgetpgrp",
            "uname",
        ),
        "modules": ("fcntl", "grp", "pwd", "resource", "termios", "tty"),
    },
}
GIB = 1 << 30
FUTEX = 202
WAIT = 128
WAKE = 129
EVERYONE = 1 << 30
SYSCTLS = {
    "hw.physicalcpu": 6,
    "hw.perflevel0.physicalcpu": 2,
    "hw.memsize": 8 * GIB,
    "kern.memorystatus_level": 25,
    "kern.smp.cores": 6,
    "hw.physmem": 8 * GIB,
    "hw.pagesize": 4096,
    "vm.stats.vm.v_free_count": 0x60000,
    "vm.stats.vm.v_inactive_count": 0x20000,
    "hw.l2cachesize": 4 << 20,
    "hw.perflevel0.l2cachesize": 12 << 20,
}
CORES = (1, 0, 1, 0, 0, 0)  # a class for each of Windows' cores: two are of the faster kind
real_libc = ctypes.CDLL(None)
noted: set[str] = set()


def note(name: str) -> None:
    if name not in noted and "TREADLE_CALLS" in os.environ:
        noted.add(name)
        with open(os.environ["TREADLE_CALLS"], "a") as file:
            file.write(f"{name}\n")


def cfunction(*types: Any) -> Callable[[Callable[..., Any]], Any]:
    """A Python function that compiled code can call."""
    return lambda function: ctypes.CFUNCTYPE(*types)(function)


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        note(function.__name__)
        return function(*args)

    return called


def futex(word: int, how: int, number: int) -> int:
    return int(real_libc.syscall(FUTEX, ctypes.c_void_p(word), how, number, None, None, 0))


def wake_all(word: int) -> None:
    futex(word, WAKE, EVERYONE)


def refuse(*_: object, **__: object) -> Any:
    raise NotImplementedError


# -- macOS ----------------------------------------------------------------------------------------


def os_sync_wait_on_address(word: Any, value: Any, n_bytes: Any, flags: Any) -> int:
    assert (n_bytes.value, flags.value) == (4, 0)
    return futex(word.value, WAIT, ctypes.c_int32(value.value).value)


@cfunction(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
def os_sync_wake_by_address_all(word: int, n_bytes: int, flags: int) -> int:
    note("os_sync_wake_by_address_all")
    assert (n_bytes, flags) == (4, 0)
    wake_all(word)
    return 0


def sysctlbyname(name: bytes, value: Any, size: Any, new: object, n_new: object) -> int:
    text = name.decode()
    data = b"Apple M0\0" if text in ("machdep.cpu.brand_string", "hw.model") else b""
    if text in SYSCTLS:
        data = struct.pack("=q" if "mem" in text and "level" not in text else "=i", SYSCTLS[text])
    value[: len(data)] = data
    size._obj.value = len(data)
    return 0 if data else -1


class Library:
    """libc: what the C library here has under the same name, but for what is Linux's."""

    sysctlbyname = staticmethod(noting(sysctlbyname))

    def __getattr__(self, name: str) -> Any:
        if name not in ("clock_gettime", "mincore", "sched_yield"):
            raise AttributeError(name)
        return getattr(real_libc, name)


class MacLibrary(Library):
    """libSystem."""

    os_sync_wait_on_address = staticmethod(noting(os_sync_wait_on_address))
    os_sync_wake_by_address_all = os_sync_wake_by_address_all


# -- FreeBSD --------------------------------------------------------------------------------------


def _umtx_op(word: Any, operation: Any, value: Any, *rest: Any) -> int:
    assert (operation.value, [each.value for each in rest]) == (15, [None, None])
    return futex(word.value, WAIT, ctypes.c_int32(value.value).value)


@cfunction(*[ctypes.c_long] * 5)
def syscall(number: int, word: int, operation: int, most: int) -> int:
    note("syscall")
    assert (number, operation) == (454, 16)
    assert 0 < most < 1 << 31
    wake_all(word)
    return 0


def cpuset_getaffinity(level: Any, which: Any, one: Any, n_bytes: Any, found: Any) -> int:
    assert (level.value, which.value, one.value, len(found)) == (3, 2, -1, n_bytes.value)
    if n_bytes.value != 32:  # what a kernel for 256 processors says
        return -1
    found[0] = 0b101101
    return 0


class FreeBSDLibrary(Library):
    """libc."""

    _umtx_op = staticmethod(noting(_umtx_op))
    syscall = syscall
    cpuset_getaffinity = staticmethod(noting(cpuset_getaffinity))


# -- Windows --------------------------------------------------------------------------------------


def WaitOnAddress(word: Any, value: Any, n_bytes: Any, milliseconds: Any) -> int:
    assert (n_bytes.value, milliseconds.value) == (4, 0xFFFF_FFFF)
    futex(word.value, WAIT, value._obj.value)
    return 1


@cfunction(None, ctypes.c_void_p)
def WakeByAddressAll(word: int) -> None:
    note("WakeByAddressAll")
    wake_all(word)


@cfunction(ctypes.c_int)
def SwitchToThread() -> int:
    time.sleep(0)
    return 1


def GetProcessAffinityMask(process: Any, mine: Any, every: Any) -> int:
    mine._obj.value = every._obj.value = 0b101101
    return 1


def GlobalMemoryStatusEx(status: Any) -> int:
    assert struct.unpack_from("=I", status.raw)[0] == len(status) == 64
    struct.pack_into("=II7Q", status, 0, 64, 50, 8 * GIB, 2 * GIB, 0, 0, 0, 0, 0)
    return 1


def GetLogicalProcessorInformationEx(relation: Any, found: Any, size: Any) -> int:
    if relation.value == 0:
        records = [struct.pack("=IIBB20xHQH6x", 0, 48, 0, kind, 1, 1, 0) for kind in CORES]
    else:
        caches = (1, 8, 64, 32 << 10), (2, 16, 64, 2 << 20), (3, 16, 64, 24 << 20)
        records = [struct.pack("=IIBBHII20xQH6x", 2, 56, *cache, 0, 1, 0) for cache in caches]
    data = b"".join(records)
    assert all(len(r) == struct.unpack_from("=II", r)[1] for r in records)
    if found is None or len(found) < len(data):
        size._obj.value = len(data)
        return 0
    found[: len(data)] = data
    return 1


def K32GetProcessMemoryInfo(process: Any, counters: Any, n_bytes: Any) -> int:
    assert n_bytes.value == len(counters) == 72
    struct.pack_into("=IIQ", counters, 0, 72, 0, 300 << 20)
    return 1


class Console:
    """The mode of the console on standard input: echo and lines, at first."""

    mode = 0b111


def GetStdHandle(number: Any) -> int:
    assert number.value == -10
    return 0x54


def GetConsoleMode(handle: Any, mode: Any) -> int:
    mode._obj.value = Console.mode
    return int(handle.value == 0x54)


def SetConsoleMode(handle: Any, mode: Any) -> int:
    Console.mode = mode.value
    return int(handle.value == 0x54)


GetStdHandle_ = noting(GetStdHandle)
LIBRARIES: dict[str, Any] = {
    "kernel32": SimpleNamespace(
        SwitchToThread=SwitchToThread,
        **{
            function.__name__: noting(function)
            for function in (
                GetProcessAffinityMask,
                GlobalMemoryStatusEx,
                GetLogicalProcessorInformationEx,
                K32GetProcessMemoryInfo,
                GetConsoleMode,
                SetConsoleMode,
            )
        },
        GetStdHandle=GetStdHandle_,
        IsProcessorFeaturePresent=lambda number: number.value in (19, 43),
    ),
    "api-ms-win-core-synch-l1-2-0": SimpleNamespace(
        WaitOnAddress=noting(WaitOnAddress), WakeByAddressAll=WakeByAddressAll
    ),
}


def locking(fd: int, how: int, n_bytes: int) -> None:
    """msvcrt's, by a lock of POSIX on the same bytes."""
    note("locking")
    assert (how, n_bytes) == (2, 1)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, n_bytes, os.lseek(fd, 0, os.SEEK_CUR))


# -- the other system -----------------------------------------------------------------------------


def hide_files(event: str, args: tuple[Any, ...]) -> None:
    """No file of /proc or /sys can be read."""
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.fsdecode(args[0])
        if path.startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", path)


def become(name: str) -> None:
    """From here on this process finds itself on another system. There is no way back."""
    for module in PRELOADED:
        __import__(module)
    os.environ["TREADLE_SYSTEM"] = name
    lacking = LACKING[name]
    for attribute in lacking["os"]:
        if hasattr(os, attribute):
            delattr(os, attribute)
    if hasattr(os, "sched_getaffinity"):
        del os.sched_getaffinity
    for attribute in [a for a in dir(mmap) if a in ("MADV_HUGEPAGE",) or name == "win32"]:
        if attribute.startswith(("MADV_", "PROT_", "MAP_")):
            delattr(mmap, attribute)
    if name == "win32":
        kept = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
        for attribute in [a for a in dir(signal) if a.startswith("SIG") and a[3:4] != "_"]:
            if attribute not in kept:
                delattr(signal, attribute)
        for attribute in ("setitimer", "pthread_sigmask", "sigwait", "ITIMER_REAL"):
            delattr(signal, attribute)
        asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = refuse  # type: ignore
        made: Any = ModuleType("msvcrt")
        made.locking = locking
        made.LK_NBLCK = 2
        sys.modules["msvcrt"] = made
        made_ctypes: Any = ctypes
        made_ctypes.WinDLL = LIBRARIES.__getitem__
        platform.machine = lambda: "AMD64"
    real_cdll = ctypes.CDLL
    real_import = builtins.__import__

    def library(path: str | None, *args: Any, **more: Any) -> Any:
        if path is not None:
            return real_cdll(path, *args, **more)
        if name == "win32":
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        return FreeBSDLibrary() if name == "freebsd" else MacLibrary()

    def find(module: str, globals: Any = None, *args: Any, **more: Any) -> Any:
        ours = (globals or {}).get("__name__", "").startswith("treadle")
        if ours and module in lacking["modules"]:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real_import(module, globals, *args, **more)

    ctypes.CDLL = library  # type: ignore[misc,assignment]
    builtins.__import__ = find  # type: ignore[assignment]
    sys.addaudithook(hide_files)
    assert threading.active_count() == 1


if __name__ == "__main__":
    become(sys.argv[1])
    sys.argv[:2] = ["treadle"]
    runpy.run_module("treadle", run_name="__main__")
