"""``treadle pull``, from a stand-in for the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.hub.fake_hub import REPOS

ROOT = Path(__file__).resolve().parents[2]


def pull(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle", "pull", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_pull_says_where_the_model_is_and_what_to_do_next(hub: dict[str, str]) -> None:
    """With its projector; without ``hf:``; a second time nothing is downloaded."""
    ended = pull(hub, "owner/eyes-GGUF:Q8_0")
    assert ended.returncode == 0, ended.stderr
    path = Path(ended.stdout.rsplit(" (", 1)[0])
    assert path.read_bytes() == REPOS["owner/eyes-GGUF"]["eyes-Q8_0.gguf"]
    assert (path.parent / "mmproj-F16.gguf").exists()
    assert ended.stdout.endswith(f" ({len(b'GGUF eight') + len(b'GGUF f16')} B)\n")
    assert "treadle: next: treadle inspect eyes (" in ended.stderr  # no model, this stand-in
    again = pull(hub | {"HF_HUB_OFFLINE": "1"}, "hf:owner/eyes-GGUF:Q8_0", "--json")
    (report,) = json.loads(again.stdout)
    assert (report["name"], report["path"]) == ("eyes", str(path))


def test_without_the_hub_a_model_that_is_here_needs_no_look_for_a_projector(
    hub: dict[str, str],
) -> None:
    name = "hf:owner/repo/tiny-Q8_0.gguf"
    assert pull(hub, name).returncode == 0
    again = pull(hub | {"HF_HUB_OFFLINE": "1"}, name)
    assert again.returncode == 0, again.stderr
    assert "whether the repository has a projector file is not known" in again.stderr


def test_pull_of_what_is_no_name_on_the_hub(hub: dict[str, str]) -> None:
    for name in ("qwen", "./owner/repo"):
        ended = pull(hub, name)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert f"{name}: no name on the hub (expected OWNER/REPO" in ended.stderr


def test_no_mmproj_leaves_the_projector(hub: dict[str, str]) -> None:
    ended = pull(hub, "owner/eyes-GGUF:Q8_0", "--no-mmproj")
    path = Path(ended.stdout.rsplit(" (", 1)[0])
    assert [file.name for file in path.parent.iterdir()] == ["eyes-Q8_0.gguf"]
