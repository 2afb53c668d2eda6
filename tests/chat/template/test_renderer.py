"""The processes that render: killed, interrupted, forked, shared by threads, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

from treadle.chat.template import renderer
from treadle.chat.template.render_process import READY, REPLY, SIZE, SPENT_TIME
from treadle.chat.template.renderer import LimitError, Renderer
from treadle.errors import TemplateError
from treadle.system import SYSTEM

ENDLESS = "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}"
NOW = datetime(2024, 7, 26, 12, 30)


@pytest.fixture
def fresh() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def pids(of: Renderer) -> list[int]:
    return [process._popen.pid for process in of._processes]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if is_gone(pid):
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} goes on")


def test_one_process_answers_again_and_again(fresh: Renderer) -> None:
    for i in range(20):
        assert fresh.render("{{ x }}{{ strftime_now('%H:%M') }}", {"x": i}, NOW) == f"{i}12:30"
        with pytest.raises(TemplateError, match="line 1: no"):
            fresh.render("{{ raise_exception('no') }}", {}, NOW)
    assert len(pids(fresh)) == 1


def test_any_text_goes_there_and_back(fresh: Renderer) -> None:
    text = "\ud800 \0 é 猫 😀 \r\n \x1b " * 5000
    assert fresh.render("{{ x }}", {"x": text}, NOW) == text


def test_names(fresh: Renderer) -> None:
    source = (
        "{% set a = b %}{{ a }}{{ c.d }}{% if f is defined %}{% endif %}{{ strftime_now('%Y') }}"
    )
    assert fresh.names(source) == ["b", "c", "f"]
    assert fresh.names("nothing") == []
    with pytest.raises(TemplateError, match="line 1"):
        fresh.names("{% if %}")


def test_one_that_was_killed_is_replaced(fresh: Renderer) -> None:
    assert fresh.render("a", {}, NOW) == "a"
    [pid] = pids(fresh)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert fresh.render("b", {}, NOW) == "b"
    assert pid not in pids(fresh)


def test_a_signals_exception_ends_a_rendering(
    fresh: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and SIGTERM are exceptions that a handler raises."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def reads(process: Any, size: int) -> bytes:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # in the middle, whatever came before
        return read(process, size)

    assert fresh.render("a", {}, NOW) == "a"
    [pid] = pids(fresh)
    before = signal.signal(signal.SIGALRM, interrupt)
    read = renderer._RenderProcess._read
    try:
        with monkeypatch.context() as patch:
            patch.setattr(renderer._RenderProcess, "_read", reads)
            with pytest.raises(KeyboardInterrupt):
                fresh.render(ENDLESS, {}, NOW)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert is_gone(pid)
    assert fresh.render("b", {}, NOW) == "b"  # no old reply


def test_a_terminals_signals_are_not_for_it(fresh: Renderer) -> None:
    fresh.render("a", {}, NOW)
    [pid] = pids(fresh)
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    fresh.render("a", {}, NOW)
    assert pids(fresh) == [pid]


def test_threads(fresh: Renderer) -> None:
    def render(i: int) -> str:
        return fresh.render("{% for j in range(500) %}{{ x }}{% endfor %}", {"x": i}, NOW)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render, range(60))) == [str(i) * 500 for i in range(60)]
    assert 1 <= len(pids(fresh)) <= renderer.MAX_PROCESSES


def test_a_fork_has_processes_of_its_own() -> None:
    """In a program without threads: pytest may have some."""
    script = """
import os, sys
from datetime import datetime
from treadle.chat.template.renderer import RENDERER
def mine():
    return [process._popen.pid for process in RENDERER._processes]
assert RENDERER.render("a", {}, datetime.now()) == "a"
before = mine()
child = os.fork()
if not child:
    assert mine() == []
    assert RENDERER.render("b", {}, datetime.now()) == "b"
    assert mine() and mine() != before
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert RENDERER.render("c", {}, datetime.now()) == "c"
assert mine() == before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("last", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pass"])
def test_it_ends_with_the_program(last: str) -> None:
    script = (
        "import os; from datetime import datetime\n"
        "from treadle.chat.template.renderer import RENDERER\n"
        "RENDERER.render('a', {}, datetime.now())\n"
        "print(*[process._popen.pid for process in RENDERER._processes], flush=True)\n" + last
    )
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    wait_until_gone(int(ran.stdout))


def test_sigterm_ends_a_program_that_renders() -> None:
    script = (
        "from datetime import datetime; from treadle.cli import leave_on_signals\n"
        "from treadle.chat.template.renderer import RENDERER\n"
        "leave_on_signals(); RENDERER.render('a', {}, datetime.now())\n"
        "print(*[process._popen.pid for process in RENDERER._processes], flush=True)\n"
        f"RENDERER.render({ENDLESS!r}, {{}}, datetime.now())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM
    wait_until_gone(pid)


def test_a_rendering_ends_even_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "LIMIT_S", 0.3)
    process = renderer._RenderProcess()
    process._send(renderer._request("render", ENDLESS, {}, NOW.isoformat()))
    assert process._popen.wait(60) == -signal.SIGALRM
    process.end()


def test_what_was_prepared(fresh: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.prepare("{{ x }}")
    [pid] = pids(fresh)
    fresh.prepare("{{ x }}")
    assert fresh.render("{{ x }}", {"x": 1}, NOW) == "1"
    assert pids(fresh) == [pid]
    fresh.close()
    # What one template's compilation takes is no fault of the next one's.
    monkeypatch.setattr(renderer, "LIMIT_S", 2)
    fresh.prepare("{% set x = [" + "1," * 300_000 + "] %}")
    assert fresh.render("{{ x }}", {"x": 2}, NOW) == "2"
    fresh.prepare("{% if %}")
    assert fresh.render("{{ x }}", {"x": 3}, NOW) == "3"


def test_the_working_directory_is_not_searched(
    fresh: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert fresh.render("a", {}, NOW) == "a"


# -- a Python to run ------------------------------------------------------------------------------


def test_a_program_that_embeds_python(fresh: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/usr/sbin/httpd")
    monkeypatch.setattr(spawn, "_python_exe", python)  # as multiprocessing.set_executable does
    assert fresh.render("a", {}, NOW) == "a"
    fresh.close()
    monkeypatch.setattr(spawn, "_python_exe", "/usr/sbin/httpd")
    assert fresh.render("a", {}, NOW) == "a"  # the installation has one
    fresh.close()
    monkeypatch.setattr(sys, "exec_prefix", "/nowhere")
    monkeypatch.setattr(sys, "base_exec_prefix", "/nowhere")
    with pytest.raises(TemplateError, match=r"multiprocessing\.set_executable"):
        fresh.render("a", {}, NOW)


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_a_python_that_does_not_start(
    fresh: Renderer, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(renderer, "_python", lambda: python)
    with pytest.raises(TemplateError, match=python):
        fresh.render("a", {}, NOW)
    fresh.prepare("a") if python == "/bin/false" else None
    with pytest.raises(TemplateError, match=python) as caught:
        fresh.render("a", {}, NOW)
    assert not isinstance(caught.value, LimitError)


# One comparison in C, which never ends: no frame of Python's changes while faulthandler writes.
STANDSTILL = (
    "{% set n = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}"
    "{% set n.a = (n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% endfor %}{{ n.a == n.b }}"
)


def test_where_a_system_has_no_timers() -> None:
    """As on Windows: a thread of faulthandler's ends the process."""
    script = "from treadle.chat.template.render_process import serve; serve(1.5, 1 << 28)"
    requests = b""
    for source in ("a", STANDSTILL):
        values = ["render", source, {}, NOW.isoformat()]
        octets = json.dumps(values).encode()
        requests += SIZE.pack(len(octets)) + octets
    ran: Any = subprocess.run(
        [sys.executable, "-c", script],
        input=requests,
        capture_output=True,
        timeout=60,
        env={**os.environ, "TREADLE_SYSTEM": "win32"},
    )
    assert ran.returncode == SPENT_TIME
    assert ran.stdout == READY + REPLY.pack(True, 1) + b"a"


def test_without_timers_the_time_that_was_spent_is_told(
    fresh: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process's clock: what faulthandler writes while frames change may crash the other."""
    monkeypatch.setenv("TREADLE_SYSTEM", "win32")  # of the processes that are started
    monkeypatch.setattr(renderer, "LIMIT_S", 0.3)
    monkeypatch.setattr(SYSTEM, "TIMERS", False)
    assert fresh.render("a", {}, NOW) == "a"
    with pytest.raises(LimitError, match=r"takes more than 0\.3 s"):
        fresh.render(ENDLESS, {}, NOW)
