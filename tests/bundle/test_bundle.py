"""A bundle as its user has it: one file, started as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WriteTiny
from treadle.files.bundled import START

pytestmark = pytest.mark.slow  # half a minute until there is one

ARGS = ("once upon", "-n", "6", "--temp", "0", "--json")


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what would make a Python find the sources."""
    gone = ("PYTHONPATH", "PEX_ROOT", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in gone}
    python = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{python}:{kept['PATH']}", **changes}


def started(*command: str, stdin: str = "", **changes: str) -> str:
    done = subprocess.run(
        command,
        env=environment(**changes),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tiny: WriteTiny) -> Any:
    """What the model completes, by an environment's treadle."""
    made = started(
        sys.executable,
        "-m",
        "treadle",
        "run",
        str(tiny("llama", "Q8_0")),
        *ARGS,
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    return json.loads(made)["text"]


def test_it_says_what_an_environment_says(bundle: Path, text: Any) -> None:
    first = json.loads(started(str(bundle), *ARGS))
    again = json.loads(started(str(bundle), "run", *ARGS))
    piped = json.loads(started(str(bundle), *ARGS[1:], stdin=ARGS[0] + "\n"))
    by_python = json.loads(started(sys.executable, str(bundle), *ARGS))
    assert [made["text"] for made in (first, again, piped, by_python)] == [text] * 4


def test_one_that_was_cut_short_says_so(bundle: Path, tmp_path: Path) -> None:
    n_bytes = bundle.stat().st_size
    for n in (n_bytes - 1, 1 << 16):
        cut = tmp_path / "a talk"
        with bundle.open("rb") as file:
            cut.write_bytes(file.read(n))
        cut.chmod(0o755)
        env = environment(PEX_ROOT=str(tmp_path / "pex"))
        done = subprocess.run([cut, "hi"], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"treadle: error: {cut}: truncated (expected {n_bytes} bytes)\n"


def test_its_second_start_goes_by_the_note_of_the_first(bundle: Path) -> None:
    assert "treadle" in started(str(bundle), "--version")
    done = subprocess.run(
        ["sh", "-x", str(bundle), "--version"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("+ exec ")
    assert last.endswith("-I -m treadle.cli.bundled --version")


def test_other_commands_are_in_it(bundle: Path) -> None:
    about = json.loads(started(str(bundle), "inspect", "--json"))
    assert about["metadata"]["general.architecture"] == "llama"
    assert "treadle [OPTIONS]" in started(str(bundle), "--help")


def test_any_treadle_reads_the_model_in_it(bundle: Path, tiny: WriteTiny) -> None:
    import treadle

    with treadle.load(bundle) as inside, treadle.load(tiny("llama", "Q8_0")) as alone:
        assert (inside.logits([1, 2, 3]) == alone.logits([1, 2, 3])).all()


def test_it_is_a_zip_archive_too(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        assert archive.testzip() is None
        assert "__main__.py" in archive.namelist()


def test_without_a_network(bundle: Path, text: Any) -> None:
    apart = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace without a network can be made here")
    assert json.loads(started(*apart, str(bundle), *ARGS))["text"] == text


def test_a_read_only_home(bundle: Path, text: Any, tmp_path: Path) -> None:
    """Nothing can be made in /proc, not even by root. Kernels are kept beside the program."""
    changes = {"TREADLE_CACHE": "/proc/none", "HOME": "/proc", "TMPDIR": str(tmp_path)}
    for _ in range(2):
        assert json.loads(started(str(bundle), *ARGS, **changes))["text"] == text
    (own,) = tmp_path.glob("treadle-*/bundles")
    assert [*own.glob("kernels/*.o")]


def test_a_home_and_a_tmp_where_nothing_may_be_executed(bundle: Path, text: Any) -> None:
    """What lies there cannot be mapped as code: beside the bundle it can."""
    apart = ["unshare", "--mount", "--map-root-user"]
    script = f"mount --bind {bundle.parent} /mnt"
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        script += f" && mount -t tmpfs -o noexec closed {folder}"
    script += ' && exec "$0" "$@"'
    if subprocess.run([*apart, "sh", "-c", script, "true"], check=False).returncode:
        pytest.skip("no namespace with mounts of its own can be made here")
    changes = {"TREADLE_CACHE": "/tmp/kernels", "TMPDIR": "/tmp"}
    made = started(*apart, "sh", "-c", script, f"/mnt/{bundle.name}", *ARGS, **changes)
    assert json.loads(made)["text"] == text
    assert [*bundle.parent.glob("treadle-*/bundles/venvs")]


@contextmanager
def serving(*command: str, **changes: str) -> Iterator[int]:
    """The process id of a server that has its model loaded."""
    process = subprocess.Popen(
        [*command, "--port", "0"],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline().startswith("http://")
            yield process.pid
        finally:
            process.terminate()


def memory(pid: int, model: Path) -> tuple[list[str], dict[str, int]]:
    """Of a process: where in ``model`` its mappings begin (hex), and kB: of these mappings' pages
    that others map too (``shared``), and of its own elsewhere (``own``).
    """
    starts = []
    sizes = {"shared": 0, "own": 0}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = words[-1] == str(model.resolve())
            starts += [words[2]] if ours else []
        elif ours and words[0] in ("Shared_Clean:", "Shared_Dirty:"):
            sizes["shared"] += int(words[1])
        elif not ours and words[0] in ("Private_Clean:", "Private_Dirty:"):
            sizes["own"] += int(words[1])
    return starts, sizes


def test_two_processes_share_the_models_pages(bundle: Path, tiny: WriteTiny) -> None:
    """And a process of a bundle has no more memory of its own than one of an environment."""
    pytest.importorskip("uvicorn")
    plain = tiny("llama", "Q8_0")
    path = os.pathsep.join(sys.path)
    by_module = (sys.executable, "-m", "treadle", "serve", str(plain))
    with serving(*by_module, PYTHONPATH=path) as c, serving(*by_module, PYTHONPATH=path) as d:
        usual = [memory(pid, plain)[1] for pid in (c, d)]
    with serving(str(bundle), "serve") as a, serving(str(bundle), "serve") as b:
        found = [memory(pid, bundle) for pid in (a, b)]
    for starts, sizes in found:
        assert starts == [f"{START:08x}"]
        assert sizes["shared"] >= min(alone["shared"] for alone in usual) > 0
    # The first of each kind may have compiled kernels; and what is imported differs a little.
    assert min(sizes["own"] for _, sizes in found) < 1.1 * min(alone["own"] for alone in usual)
