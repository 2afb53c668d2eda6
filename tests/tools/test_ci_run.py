"""``.ci/run``: what it leaves behind when the quick tier fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
COREUTILS = ("cat", "dirname", "id", "mkdir", "mktemp", "rm", "sleep", "tail", "tee", "touch")
STUBS = {
    "apt-get": '[ "$2" = update ] && exit\necho begun >>$OUT/apt\nsleep 0.5\necho ended >>$OUT/apt',
    "make": 'for _ in $(seq 200); do [ -e "$OUT/$WHEN" ] && break; sleep 0.05; done\nexit 3',
    "python": 'echo "$1"\n[ "$1" != tools/fetch_models.py ] || { touch $OUT/models; sleep 60; }',
    "sudo": 'shift; exec "$@"',
}


@pytest.mark.skipif(sys.platform != "linux" or BASH is None, reason="a script for Linux and bash")
@pytest.mark.parametrize("fails_during", ["apt", "models"])
def test_a_failure_waits_for_apt_and_for_nothing_else(fails_during: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "seq", *COREUTILS):
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    out = tmp_path / "out"
    out.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(f"#!{BASH}\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    variables = {
        "PATH": str(programs),
        "OUT": str(out),
        "TMPDIR": str(out),
        "PYTHON": "python",
        "WHEN": fails_during,
    }
    ran = subprocess.run(
        [str(programs / "bash"), str(script)],
        capture_output=True,
        text=True,
        env=variables,
        timeout=30,
        check=False,
    )
    assert ran.returncode == 3
    assert (out / "apt").read_text().split() in (["begun", "ended"], ["begun", "ended"] * 2)
    assert ("waiting until apt-get has ended" in ran.stdout) == (fails_during == "apt")
    _, _, log = ran.stdout.partition("== fetched beside it, until the failure ==\n")
    assert log.startswith("-- emulators of other machines")
    assert ("-- real models" in log) == (fails_during == "models")
    assert sorted(os.listdir(out)) == sorted({"apt", fails_during})  # its folder is gone
