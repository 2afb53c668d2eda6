"""The calls of macOS, FreeBSD and Windows by the fakes of ``elsewhere.py``, in this process; the
fallbacks of systems without these calls; and what POSIX and Linux are asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.system import elsewhere
from tests.system.elsewhere import GIB, LIBRARIES, FreeBSDLibrary, MacLibrary
from treadle.system import SYSTEM, freebsd, linux, macos, posix, posix_terminal, sysctl, windows
from treadle.system.freebsd import FreeBSD
from treadle.system.linux import Linux
from treadle.system.macos import MacOS
from treadle.system.posix import Posix
from treadle.system.protocol import System
from treadle.system.windows import Windows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes stand on Linux' calls")

ALLOWED = [0, 2, 3, 5]  # the processors of the fakes
TIMEOUT_S = 60


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> MacOS:
    for module in (macos, sysctl):
        monkeypatch.setattr(module, "LIBC", MacLibrary())
    return MacOS()


@pytest.fixture
def bsd(monkeypatch: pytest.MonkeyPatch) -> FreeBSD:
    for module in (freebsd, sysctl):
        monkeypatch.setattr(module, "LIBC", FreeBSDLibrary())
    return FreeBSD()


@pytest.fixture
def win(monkeypatch: pytest.MonkeyPatch) -> Windows:
    monkeypatch.setattr(ctypes, "WinDLL", LIBRARIES.__getitem__, raising=False)
    return Windows()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Windows' file where its libraries are missing."""
    monkeypatch.delattr(ctypes, "WinDLL", raising=False)
    return Windows()


# -- threads ---------------------------------------------------------------------------------------


def check_sleep(system: System, wake: Callable[[int], object]) -> None:
    """A thread sleeps as long as a word has its value, and is woken after a change."""
    word = np.array([7, 0], np.int32)
    address = word.ctypes.data
    system.sleep(address, 6)  # it has changed already: returns at once
    woken = threading.Event()

    def sleep() -> None:
        while word[0] == 7:
            system.sleep(address, 7)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert not woken.wait(0.02)
    word[0] = -8
    end = time.monotonic() + TIMEOUT_S
    while not woken.wait(0.001):  # it may not be asleep yet
        assert time.monotonic() < end
        wake(address)
    thread.join()
    system.sleep(address, 7)


def called(system: System, name: str, *types: Any) -> Any:
    """A C function of the system's, by its address."""
    return ctypes.CFUNCTYPE(*types)(system.calls()[name])


def test_macos_sleeps_on_a_word(mac: MacOS) -> None:
    assert not mac.SLEEP_POLLS
    wake = called(mac, "wake", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
    check_sleep(mac, lambda word: wake(word, 4, 0))


def test_freebsd_sleeps_on_a_word(bsd: FreeBSD) -> None:
    assert not bsd.SLEEP_POLLS
    calls = bsd.calls()
    wake = called(bsd, "wake", *[ctypes.c_long] * 5)
    check_sleep(bsd, lambda word: wake(calls["futex"], word, calls["how"], 1 << 30))


def test_windows_sleeps_on_a_word(win: Windows) -> None:
    assert not win.SLEEP_POLLS
    check_sleep(win, called(win, "wake", None, ctypes.c_void_p))
    assert called(win, "offer", ctypes.c_int)() == 1


def test_linux_sleeps_on_a_word() -> None:
    system = Linux()
    calls = system.calls()
    wake = called(system, "wake", *[ctypes.c_long] * 5)
    check_sleep(system, lambda word: wake(calls["futex"], word, calls["how"], 1 << 30))


def test_without_such_a_call_a_thread_naps(bare: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linux, "FUTEX", 0)
    for module in (macos, freebsd):
        monkeypatch.setattr(module, "LIBC", SimpleNamespace())
    systems: list[System] = [Posix(), Linux(), MacOS(), FreeBSD(), bare]
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    for system in systems:
        assert "wake" not in system.calls()
        system.sleep(0, 7)  # not an address that anybody reads
    assert naps == [0.001] * len(systems)
    assert [MacOS().SLEEP_POLLS, FreeBSD().SLEEP_POLLS, bare.SLEEP_POLLS, Posix().SLEEP_POLLS] == [
        True
    ] * 4


@pytest.mark.parametrize("kind", [Posix, Windows])
def test_a_clock_for_compiled_code(kind: Callable[[], System]) -> None:
    """Seconds and nanoseconds, and it goes on."""
    system = kind()
    clock = called(system, "clock", ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    number = system.calls().get("clock_number", 0)
    found = np.full((2, 2), -1, np.int64)
    before = time.monotonic_ns()
    for row in found:
        assert clock(number, row.ctypes.data) == 0
    after = time.monotonic_ns()
    (first, second) = (int(s) * 10**9 + int(ns) for s, ns in found)
    assert before <= first <= second <= after
    assert (found[:, 1] < 10**9).all()


def test_forks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: told.append(functions))
    Posix().register_fork_hooks(list, dict)
    Posix().after_fork(set)
    assert told == [{"before": list, "after_in_parent": dict}, {"after_in_child": set}]


# -- the machine -----------------------------------------------------------------------------------


def test_what_macos_tells(mac: MacOS, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mac.cores() == (6, 2)
    assert mac.memory() == (8 * GIB, 2 * GIB)
    assert mac.cache_bytes() == 12 << 20
    assert mac.cpu_name() == "Apple M0"
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=300 << 20))
    assert mac.peak_bytes() == 300 << 20  # in bytes; elsewhere in KB
    assert Posix().peak_bytes() == 300 << 30
    monkeypatch.setenv("HOME", "/Users/me")
    assert mac.cache_folder() == Path("/Users/me/Library/Caches")
    assert mac.sigbus() is None  # its layout is not this system's


def test_the_features_of_an_arm_mac(mac: MacOS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert mac.cpu_features() == set()
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert mac.cpu_features() == {"neon"}
    told = {
        "hw.optional.arm.FEAT_DotProd": 1,
        "hw.optional.arm.FEAT_BF16": 0,
        "hw.optional.arm.FEAT_SME": 1,
        "hw.optional.arm.sme_max_svl_b": 64,
    }
    monkeypatch.setattr(elsewhere, "SYSCTLS", told)
    assert mac.cpu_features() == {"neon", "dotprod", "sme", "svl512"}


def test_a_system_without_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysctl, "LIBC", SimpleNamespace())
    assert MacOS().cores() is None
    assert MacOS().memory() == (0, 0)
    assert MacOS().cpu_name() == ""
    assert FreeBSD().cores() is None


def test_cores_of_one_kind(mac: MacOS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "SYSCTLS", {"hw.physicalcpu": 4})
    assert mac.cores() == (4, 4)


def test_what_freebsd_tells(bsd: FreeBSD) -> None:
    assert bsd.affinity() == ALLOWED
    assert bsd.cores() == (6, 6)
    assert bsd.memory() == (8 * GIB, 2 * GIB)
    assert bsd.cpu_name() == "Apple M0"


def test_what_windows_tells(win: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert win.affinity() == ALLOWED
    assert win.cores() == (6, 2)
    assert win.memory() == (8 * GIB, 2 * GIB)
    assert win.peak_bytes() == 300 << 20
    assert win.cache_bytes() == 24 << 20
    assert not win.request_tiles()
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert win.cpu_features() == set()
    monkeypatch.setattr("platform.machine", lambda: "ARM64")
    assert win.cpu_features() == {"neon", "dotprod"}
    monkeypatch.setenv("LOCALAPPDATA", r"C:\Users\me\AppData\Local")
    assert win.cache_folder() == Path(r"C:\Users\me\AppData\Local")
    monkeypatch.delenv("LOCALAPPDATA")
    monkeypatch.setenv("HOME", "/me")
    assert win.cache_folder() == Path("/me/AppData/Local")


def test_windows_names_the_processor_of_its_registry(
    win: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert win.cpu_name() == ""  # there is no registry here

    class Key:
        def __enter__(self) -> str:
            return "key"

        def __exit__(self, *_: object) -> None:
            pass

    def open_key(root: str, path: str) -> Key:
        assert (root, path) == ("machine", windows.NAME_KEY)
        return Key()

    made: Any = ModuleType("winreg")
    made.HKEY_LOCAL_MACHINE = "machine"
    made.OpenKey = open_key
    made.QueryValueEx = lambda key, name: (f"{key} {name}  ", 1)
    monkeypatch.setitem(sys.modules, "winreg", made)
    assert win.cpu_name() == "key ProcessorNameString"


def test_without_libraries_windows_tells_nothing(
    bare: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("platform.machine", lambda: "ARM64")
    assert bare.affinity() == [0, 1, 2]
    assert bare.cores() is None
    assert bare.memory() == (0, 0)
    assert bare.peak_bytes() is None
    assert bare.cache_bytes() == 0
    assert bare.cpu_features() == set()
    assert bare.terminal(0) is None
    assert windows.library("kernel32") is None


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise FileNotFoundError(name)

    monkeypatch.setattr(ctypes, "WinDLL", load, raising=False)
    assert windows.library("kernel32") is None


def test_a_call_of_windows_that_fails(win: Windows) -> None:
    win.kernel = SimpleNamespace(
        GlobalMemoryStatusEx=lambda status: 0,
        K32GetProcessMemoryInfo=lambda *_: 0,
        GetLogicalProcessorInformationEx=lambda *_: 0,
    )
    assert win.memory() == (0, 0)
    assert win.peak_bytes() is None
    assert win.cores() is None


def test_linux_has_matrix_registers_of_x86_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the call means another one elsewhere."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", None)
    assert not Linux().request_tiles()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    asked: list[tuple[int, ...]] = []

    def syscall(*args: int) -> int:
        asked.append(args)
        return 0 if len(asked) == 1 else -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    assert Linux().request_tiles()
    assert not Linux().request_tiles()  # refused
    assert asked == [(158, 0x1023, 18)] * 2
    assert Linux().cpu_features() == set()  # LLVM detects them


# -- files -----------------------------------------------------------------------------------------


def test_windows_locks_a_byte_beyond_the_file(
    win: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    fd = os.open(path, os.O_RDWR)
    locked: list[tuple[int, int, int]] = []

    def locking(fd: int, how: int, n_bytes: int) -> None:
        locked.append((os.lseek(fd, 0, os.SEEK_CUR), how, n_bytes))
        if len(locked) > 1:
            raise PermissionError(13, "another process has it")

    try:
        os.lseek(fd, 3, os.SEEK_SET)
        monkeypatch.setitem(sys.modules, "msvcrt", None)
        with pytest.raises(OSError, match="no locks"):
            win.lock(fd)
        made: Any = ModuleType("msvcrt")
        made.locking = locking
        made.LK_NBLCK = 2
        monkeypatch.setitem(sys.modules, "msvcrt", made)
        assert win.lock(fd)
        assert not win.lock(fd)
        assert locked == [(1 << 40, 2, 1)] * 2
        assert os.lseek(fd, 0, os.SEEK_CUR) == 3  # as it was
        assert win.write_at(fd, memoryview(b"XY"), 2) == 2
        assert path.read_bytes() == b"abXYef"
        assert win.next_data(fd, 1, 6) == (1, 6)  # it knows no holes
        about = os.fstat(fd)
        assert (win.allocated(about), win.block_bytes(tmp_path), win.other_writer(about)) == (
            6,
            0,
            None,
        )
    finally:
        os.close(fd)


def test_a_lock_of_posix_is_its_files_alone(tmp_path: Path) -> None:
    system = Posix()
    fds = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    try:
        assert system.lock(fds[0])
        assert not system.lock(fds[1])
        os.close(fds[0])
        assert system.lock(fds[1])
    finally:
        os.close(fds[1])


def test_holes_are_passed_over(tmp_path: Path) -> None:
    block = 1 << 20
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4 * block)
        fd = file.fileno()
        system = Posix()
        assert system.write_at(fd, memoryview(b"x" * block), 2 * block) == block
        begin, end = system.next_data(fd, 0, 4 * block)
        assert begin <= 2 * block < 3 * block <= end
        assert (begin, end) in ((2 * block, 3 * block), (0, 4 * block))  # without holes all is data
        assert system.next_data(fd, 4 * block, 4 * block) == (4 * block, 4 * block)
        assert block <= system.allocated(os.fstat(fd)) <= 4 * block
    assert system.block_bytes(tmp_path) == os.statvfs(tmp_path).f_frsize
    assert system.next_data(fd, 1, 5) == (1, 5)  # no such file: all may be data


@pytest.mark.parametrize(
    ("mode", "mine", "who"),
    [
        (0o600, True, None),
        (0o755, True, None),
        (0o620, True, "others"),
        (0o602, True, "others"),
        (0o600, False, "another user"),
    ],
)
def test_who_else_may_change_a_file(
    mode: int, mine: bool, who: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    about = path.stat()
    assert stat.S_IMODE(about.st_mode) == mode
    if not mine:
        monkeypatch.setattr(os, "getuid", lambda: about.st_uid + 1)
    assert Posix().other_writer(about) == who


def test_a_folder_is_flushed_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    Posix().sync_folder(tmp_path)
    Posix().sync_folder(tmp_path / "none")
    assert flushed == [str(tmp_path)]


def test_the_cache_is_in_the_home_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert Posix().cache_folder() == Path("/fast")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Posix().cache_folder() == Path("/me/.cache")


# -- mapped files and the page cache ---------------------------------------------------------------


def resident(array: np.ndarray) -> list[bool]:
    flags = np.zeros(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    SYSTEM.mark_resident(array.ctypes.data, array.nbytes, flags.ctypes.data)
    return [bool(flag & 1) for flag in flags]


def test_residence_of_pages(tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (page // 64))  # four pages
    rows = np.memmap(path, np.uint8, "r")
    assert rows.sum() == 4 * page // 256 * sum(range(256))
    assert resident(rows) == [True] * 4
    system = Linux()
    with path.open("rb") as file:
        system.unmap_pages(os.stat(path), page, 3 * page)
        system.drop_pages(file.fileno(), 0, 0)
        system.fetch_pages(file.fileno(), 0, 4 * page)
    system.expect_random(rows[page : 2 * page])  # the bytes are the same, whatever is advised
    assert rows.sum() == 4 * page // 256 * sum(range(256))
    with pytest.raises(OSError, match="mincore"):
        system.mark_resident(rows.ctypes.data + 1, page, rows.ctypes.data)
    with pytest.raises(OSError, match="does not report"):
        Windows().mark_resident(rows.ctypes.data, page, 0)


def test_only_the_files_own_mappings_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of another file, and none that can be written: there the changes would be lost."""
    page = mmap.PAGESIZE
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * page))
    (tmp_path / "other").write_bytes(bytes(8 * page))
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(linux, "advise", lambda *args: advised.append(args))
    read = np.memmap(path, np.uint8, "r")
    part = np.memmap(path, np.uint8, "r", offset=4 * page)
    written = np.memmap(path, np.uint8, "r+")
    other = np.memmap(tmp_path / "other", np.uint8, "r")
    Linux().unmap_pages(os.stat(path), 3 * page, 6 * page)
    expected = {
        (read.ctypes.data + 3 * page, 3 * page, mmap.MADV_DONTNEED),
        (part.ctypes.data, 2 * page, mmap.MADV_DONTNEED),
    }
    assert set(advised) == expected
    assert not written.any()  # they are still mapped
    assert not other.any()


def test_advice_begins_with_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(madvise=lambda *args: given.append(tuple(a.value for a in args)))
    monkeypatch.setattr(posix, "LIBC", fake)
    posix.advise(3 * mmap.PAGESIZE + 100, 50, 4)
    assert given == [(3 * mmap.PAGESIZE, 150, 4)]


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Posix, Linux])
def test_a_file_in_memory_shows_writes_at_once(kind: type[Posix]) -> None:
    fd = kind().memory_file()
    assert fd is not None
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        assert not os.get_blocking(fd)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
            os.pwrite(fd, b"now", 5)
            assert mapped[5:8] == b"now"
    finally:
        os.close(fd)


def test_a_kernel_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = Linux().memory_file()
    assert fd is not None
    os.close(fd)


def test_the_signal_of_missing_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Linux().sigbus()
    assert layout is not None
    assert layout["number"] == signal.SIGBUS
    assert Posix().sigbus() is None
    monkeypatch.setattr(sys, "getandroidapilevel", lambda: 30, raising=False)
    assert Linux().sigbus() is None  # its C library has another layout


def test_the_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[set[signal.Signals]] = []
    monkeypatch.setattr(signal, "sigwait", waited.append)
    Posix().wait_for_end()
    assert waited == [{signal.SIGINT, signal.SIGTERM}]

    handlers: dict[int, Any] = {}
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            handlers[signal.SIGTERM](signal.SIGTERM, None)

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr("time.sleep", sleep)
    Windows().wait_for_end()
    assert handlers.keys() == {signal.SIGINT, signal.SIGTERM}
    assert len(naps) == 3


# -- limits of this process ------------------------------------------------------------------------


def test_a_timer_that_nothing_inherited_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[Any, ...]] = []
    for name in ("signal", "pthread_sigmask", "setitimer"):
        monkeypatch.setattr(signal, name, lambda *args, name=name: set_to.append((name, *args)))
    Posix().end_after(2.5)
    assert set_to == [
        ("signal", signal.SIGALRM, signal.SIG_DFL),
        ("pthread_sigmask", signal.SIG_UNBLOCK, [signal.SIGALRM]),
        ("setitimer", signal.ITIMER_REAL, 2.5),
    ]


def test_memory_is_bounded_above_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(Linux, "mapped_bytes", lambda self: 5 * GIB)
    opened: list[str] = []

    def refuse(path: str, *_: object) -> Any:
        opened.append(path)
        raise PermissionError(13, "no")

    monkeypatch.setattr("builtins.open", refuse)
    Linux().bound_memory(GIB)
    monkeypatch.undo()
    assert limits == {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_AS: (6 * GIB, 6 * GIB)}
    assert opened == ["/proc/self/oom_score_adj"]
    before = Linux().mapped_bytes()
    assert before is not None
    with mmap.mmap(-1, 64 << 20):
        assert (Linux().mapped_bytes() or 0) - before >= 32 << 20  # others may have been unmapped


def test_memory_is_not_bounded_where_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert Posix().mapped_bytes() is None
    Posix().bound_memory(GIB)
    assert limits == {resource.RLIMIT_CORE: (0, 0)}


def test_a_limit_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    Posix().bound_memory(GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    assert Posix().most_files() == 256
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert Posix().most_files() == 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    assert Posix().most_files() is None


# -- terminals -------------------------------------------------------------------------------------


def test_a_console_of_windows(win: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert win.terminal(0) is None  # no terminal at all
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    monkeypatch.setattr(elsewhere.Console, "mode", 0b111)
    console = win.terminal(0)
    assert console is not None
    assert console.is_ours()
    modes = []
    for shown, lines in ((False, True), (False, False), (True, True)):
        console.show(shown, lines=lines)
        modes.append(elsewhere.Console.mode)
    assert modes == [0b011, 0b001, 0b111]
    win.kernel = SimpleNamespace(
        GetStdHandle=elsewhere.GetStdHandle, GetConsoleMode=lambda handle, mode: 0
    )
    assert win.terminal(0) is None  # a pipe


def test_a_terminal_of_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    import termios

    keyboard, fd = os.openpty()
    try:
        terminal = Posix().terminal(fd)
        assert isinstance(terminal, posix_terminal.Termios)
        usual = termios.tcgetattr(fd)
        terminal.show(False, lines=True)
        assert not termios.tcgetattr(fd)[3] & termios.ECHO
        assert termios.tcgetattr(fd)[3] & termios.ICANON
        terminal.show(False, lines=False)
        assert not termios.tcgetattr(fd)[3] & (termios.ECHO | termios.ICANON)
        assert not termios.tcgetattr(fd)[0] & termios.ICRNL
        terminal.show(True, lines=True)
        assert termios.tcgetattr(fd) == usual
        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
        assert terminal.is_ours()
        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
        assert not terminal.is_ours()
        monkeypatch.undo()
    finally:
        os.close(keyboard)
        os.close(fd)
    terminal.show(False, lines=True)  # it is gone
    assert terminal.is_ours()
    assert posix_terminal.open_terminal(fd) is None
