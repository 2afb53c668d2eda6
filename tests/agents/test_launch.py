"""``treadle launch``: agents that record what they are given, and servers that only list models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.fake import install_agent, listed, lists
from tests.cli.conftest import Run, run
from treadle.agents import server as server_module
from treadle.agents.process import run_agent
from treadle.agents.server import AgentServer, agent_context
from treadle.agents.settings import Endpoint, past_proxy
from treadle.agents.table import AGENTS, find_agent
from treadle.cli.commands import launch

__all__ = ["run"]  # the fixture
NAME = "Some-Model-1B.Q8_0"
PATIENCE_S = 120
# What a server does that is started for an agent: an address, and the end with its input.
READY = "print({url!r}, flush=True); sys.stdin.read()"
FAILS = "print('treadle: error: a.gguf: no such file', file=sys.stderr); sys.exit(1)"

posix = pytest.mark.skipif(os.name != "posix", reason="fake agents are scripts")
pytestmark = posix


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing of the user's, and a cache of its own."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("TREADLE_URL", "TREADLE_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def record(place: Path) -> dict[str, Any]:
    """The arguments and the environment of the agent, and the files of its folder."""
    found: dict[str, Any] = json.loads((place / "record.json").read_text())
    for name in ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES"):  # a shell's own
        found["environment"].pop(name, None)
    files = (place / "cache" / "agents").rglob("*")
    return {**found, "files": {str(p): p.read_text() for p in files if p.is_file()}}


@pytest.mark.every_case
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_gets_what_print_shows(
    agent: Any, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed script does the same as the command, and both name server, model and context."""
    install_agent(place / "bin", agent.executable)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's")
    with lists(listed(NAME)) as url:
        given = ["launch", agent.name, "--url", url, "--"]
        ran = run(*given, "-p", "two words")
        script = run(given[0], given[1], "--print", *given[2:], "-p", "two words")
    assert (ran.code, ran.out) == (7, "")
    launched = record(place)
    assert (script.code, script.err) == (0, "")
    for path in map(Path, launched["files"]):
        assert path.stat().st_mode & 0o077 == 0  # it may have a key
        path.unlink()
    by_hand = subprocess.run(["sh", "-c", script.out], timeout=PATIENCE_S, check=False)
    assert by_hand.returncode == 7
    assert record(place) == launched  # and files that the agent makes have the same modes
    assert all(Path(path).stat().st_mode & 0o077 == 0 for path in launched["files"])

    assert launched["arguments"][-2:] == ["-p", "two words"]
    own = {k: v for k, v in launched["environment"].items() if k not in os.environ}
    told = json.dumps([own, launched["arguments"], launched["files"]])
    assert url in told
    assert NAME in told
    assert "40960" in told
    assert all(f"set {name}=" in ran.err for name in own)
    assert all(f"wrote {path}" in ran.err for path in launched["files"])
    for path, text in launched["files"].items():
        if not path.endswith(".js"):
            json.loads(text)


def test_a_key_of_anthropic_is_left_out(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_agent(place / "bin", "claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's")
    with lists(listed(NAME), key="k3y") as url:
        ran = run("launch", "claude", "--url", url, "--api-key", "k3y")
        assert (ran.code, "k3y" in ran.err) == (7, False)
        refused = run("launch", "claude", "--url", url)
    environment = record(place)["environment"]
    assert "ANTHROPIC_API_KEY" not in environment
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k3y"
    assert refused.code == 1
    assert "the server wants an API key" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "cluade"], "no agent 'cluade'; did you mean 'claude'?"),
        (["launch", "claude"], "Claude Code is not installed: no 'claude' in PATH. Its vendor's "
         "command: npm install -g @anthropic-ai/claude-code"),
        (["launch", "claude", "--print", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["launch", "claude", "--url", "unix:/a/b.sock"], "unix:/a/b.sock: agents need http://HOST"),
    ],
)  # fmt: skip
def test_errors(
    words: list[str], said: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place))
    ran = run(*words)
    assert (ran.code, ran.out) == (2 if "unix" in said else 1, "")
    assert said in ran.err
    assert not (place / "cache").exists()


def test_agents_by_other_names_and_listed(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_agent("Claude-Code") is find_agent("claude")
    assert find_agent("cn").name == "continue"
    install_agent(place / "bin", "cn")
    monkeypatch.setenv("PATH", str(place / "bin"))
    rows = [line.split() for line in run("launch").out.splitlines()]
    assert [row[0] for row in rows if "yes" in row] == ["continue"]


def test_the_server_must_have_the_model(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are compared as people write them; several models need one; vectors are no text."""
    install_agent(place / "bin", "codex")
    vectors = {"output_modalities": ["embeddings"]}
    two = (
        listed(NAME),
        listed("other", aliases=["coder"]),
        listed("vec", architecture=vectors),
    )
    with lists(*two) as url:
        unnamed = run("launch", "codex", "--url", url)
        wrong = run("launch", "codex", "--url", url, "--model", "third")
        mute = run("launch", "codex", "--url", url, "--model", "vec")
        aliased = run("launch", "codex", "--url", url, "--model", "Coder")
        assert 'model="other"' in record(place)["arguments"]
        by_file = run("launch", "codex", "--url", url, "--model", f"/models/{NAME.lower()}.gguf")
        assert f'model="{NAME}"' in record(place)["arguments"]
    assert (aliased.code, by_file.code) == (7, 7)
    assert f"several models: name one with --model: {NAME}, other\n" in unnamed.err
    assert "not third" in wrong.err
    assert mute.err == f"treadle: error: {url}: the model vec writes no text\n"
    with lists(listed("vec", architecture=vectors)) as url:
        mute = run("launch", "codex", "--url", url)
        assert mute.err == f"treadle: error: {url} serves no model that writes text\n"
    with lists(listed(NAME, owner="somebody")) as url:
        assert launch.find_server(url, None, None, explicit=False) is None
        assert launch.find_server(url, None, None, explicit=True) == Endpoint(
            url, NAME, 40960, sees=True
        )


def starts(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Make a server that is started one that runs ``program``."""
    monkeypatch.setattr(server_module, "START", f"import sys; {program}")


def test_a_server_is_started_and_stopped(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_agent(place / "bin", "opencode")
    install_agent(place / "bin", "qwen")
    gguf = place / "m.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(launch, "good_context", lambda model: 16384)
    started: list[Any] = []
    own = server_module.AgentServer.stop

    def stop(self: AgentServer) -> None:
        started.append(self)
        own(self)

    monkeypatch.setattr(server_module.AgentServer, "stop", stop)
    with lists(listed("else")) as other, lists(listed(NAME)) as url:
        monkeypatch.setattr(launch, "ADDRESS", other)
        starts(monkeypatch, READY.format(url=url))
        ran = run("launch", "qwen", "--model", str(gguf))
        assert ran.code == 7
        assert f"the server at {other} serves else, not {gguf}" in ran.err
        assert record(place)["environment"]["OPENAI_BASE_URL"] == f"{url}/v1"
        command = started[0]._process.args
        assert command[-8:] == [str(gguf), "-c", "16384", "--sequences", "2",
                                "--port", "0", "--no-log"]  # fmt: skip
        assert not list((place / "cache").rglob("*.json"))  # nothing listens there later
        starts(monkeypatch, f"print({url!r}, flush=True); {FAILS}")
        ran = run("launch", "opencode", "--model", "m")
        assert ran.code == 7
    assert all(each._process.returncode is not None for each in started)
    monkeypatch.setattr(launch, "ADDRESS", "http://127.0.0.1:9")
    starts(monkeypatch, FAILS)
    ran = run("launch", "opencode", "--model", "m")
    assert (ran.code, ran.err) == (
        1,
        "treadle: error: the server did not start: a.gguf: no such file\n",
    )
    ran = run("launch", "opencode")
    assert "name the model with --model" in ran.err


def test_a_server_that_ends_meanwhile_is_told(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lists(listed(NAME)) as url:
        starts(monkeypatch, f"print({url!r}, flush=True); {FAILS}")
        with AgentServer(["m"]) as server:
            assert server.wait(lambda: None) == url
            server._process.wait(PATIENCE_S)
            assert (server.has_ended(), server.last_message()) == (True, "a.gguf: no such file")


def test_signals_are_the_agents(place: Path) -> None:
    """It is told to end as this process is; what is typed on the terminal ends only the agent."""
    typed_and_sent = "for n in (2, 15): os.kill(os.getppid(), n)"
    agent = install_agent(place / "bin", "pi", f"{typed_and_sent}\ntime.sleep(60)")
    assert run_agent(str(agent), [], os.environ) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_context_of_a_server_for_agents() -> None:
    assert agent_context(131072, 1 << 30, None) == 65536
    assert agent_context(8192, 1 << 30, 0) == 8192
    gib = 1 << 30  # 8 KiB a token: two texts of 65536 are 1 GiB
    assert agent_context(131072, gib, 2 * gib) == 65536
    assert agent_context(131072, gib, 2 * gib - 1) == 32768
    assert agent_context(131072, gib, 0) == agent_context(20000, gib, 0) == 16384


def test_calls_to_this_machine_pass_a_proxy() -> None:
    proxy = {"HTTP_PROXY": "http://proxy:3128"}
    both = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    assert past_proxy("http://127.0.0.1:8080", proxy) == both
    kept = past_proxy("http://127.0.0.1:8080", proxy | {"NO_PROXY": "a.org"})
    assert kept["NO_PROXY"] == "a.org,127.0.0.1"
    assert past_proxy("http://127.0.0.1:8080", {}) == {}
    assert past_proxy("http://gpu:8080", proxy) == {}


@pytest.mark.slow
def test_a_real_server_ends_with_its_parent(one_kernel_cache: Path) -> None:
    """Started as ``launch`` does; the end of its input is the end of the process that holds it."""
    server = AgentServer([*launch.serve_arguments(str(DEMO), None), "--port", "0"])
    try:
        url = server.wait(lambda: None)
        endpoint = launch.find_server(url, str(DEMO), None, explicit=False)
        assert endpoint is not None
        assert endpoint.model == "demo"
        assert server._process.stdin is not None
        server._process.stdin.close()
        assert server._process.wait(PATIENCE_S) == 0
    finally:
        server.stop()


DEMO = Path(sys.modules["treadle"].__file__ or "").parent / "data" / "demo.gguf"
