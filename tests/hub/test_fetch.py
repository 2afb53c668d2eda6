"""Downloads by name, from a stand-in for the hub on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hub.fake_hub import GIB, SIZES, Hub
from treadle.files.projector_files import projectors_beside

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, shutil, sys, time, types
import treadle.hub.fetch as module
from treadle.errors import TreadleError
waits = []
time.sleep = waits.append  # retries need not wait here
free = {}
module.free_bytes = lambda: int(free["memory"] * 2**30)
usage = lambda folder: types.SimpleNamespace(free=int(free["disk"] * 2**30))
module.shutil = types.SimpleNamespace(disk_usage=usage)
for ref, memory, disk, to_run, eyes in json.loads(sys.argv[1]):
    free.update(memory=memory, disk=disk)
    path = error = None
    said, calls = [], []
    waits.clear()
    try:
        report = lambda *call: calls.append(call)
        more = {"progress": report, "say": said.append}
        if eyes == "alone":
            path = str(module.download_projector(ref, **more))
        else:
            path = str(module.download(ref, to_run=to_run, projector=eyes, **more))
    except TreadleError as e:
        error = f"{type(e).__name__}: {e}"
    print(json.dumps({"path": path, "error": error, "said": said, "calls": calls,
                      "n_waits": len(waits)}))
"""
Eyes = bool | str | None
Ask = (
    str
    | tuple[str, float, float]
    | tuple[str, float, float, bool]
    | tuple[str, float, float, bool, Eyes]
)
NORMAL = (64, 64, True, False)


class Ended(NamedTuple):
    path: Path | None
    error: str  # "" for none
    said: list[str]
    calls: list[list[Any]]  # of the progress callback
    n_waits: int  # before retries

    def read(self) -> bytes:
        assert self.path is not None, self.error
        return self.path.read_bytes()


def fetch(env: dict[str, str], *asks: Ask) -> list[Ended]:
    """Download in a process of its own: huggingface_hub reads its variables when imported.

    Each of ``asks`` is a name, or one with the GiB of memory and of disk that are free, and with
    whether the model is to run, and with whether its projector comes too ("alone": that only).
    """
    given = [(ask,) if isinstance(ask, str) else ask for ask in asks]
    full = [(*ask, *NORMAL[len(ask) - 1 :]) for ask in given]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(full)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    return [
        Ended(t["path"] and Path(t["path"]), t["error"] or "", t["said"], t["calls"], t["n_waits"])
        for t in told
    ]


def downloads() -> list[str]:
    return [path for path in Hub.requests if "/resolve/" in path]


def test_a_file_is_downloaded_once(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, "hf:owner/repo/tiny-Q8_0.gguf")
    assert ended.read() == b"GGUF whole"
    assert ended.calls[-1] == ["downloading tiny-Q8_0.gguf", 10, 10]
    assert ended.said == []
    before = downloads()
    (again,) = fetch(hub, "hf:owner/repo/tiny-Q8_0.gguf")
    assert again.path == ended.path
    assert downloads() == before


@pytest.mark.slow
def test_offline_what_is_here_is_found_and_the_rest_is_a_clear_error(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, "hf:owner/repo/tiny-Q8_0.gguf")
    Hub.requests.clear()
    missing = ["hf:owner/repo/x.gguf", "hf:owner/types-GGUF", "hf:owner/repo:Q5_0"]
    here, *rest = fetch(hub | {"HF_HUB_OFFLINE": "1"}, "hf:owner/repo/tiny-Q8_0.gguf", *missing)
    assert here.path == ended.path
    expected = "is not in the local cache, and HF_HUB_OFFLINE forbids a download"
    assert [r.error for r in rest] == [f"FileError: {ref}: {expected}" for ref in missing]
    assert Hub.requests == []


def test_without_a_network_that_is_what_is_said(hub: dict[str, str]) -> None:
    refs = ["hf:owner/repo", "hf:owner/repo/x.gguf", "hf:owner/repo:Q8_0"]
    for ref, ended in zip(
        refs, fetch(hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}, *refs), strict=True
    ):
        unreached = f"FileError: {ref}: cannot be downloaded: http://127.0.0.1:9 does not answer"
        assert ended.error.startswith(unreached)
        assert "refused" in ended.error
        assert ended.n_waits == 0  # huggingface_hub's own take 25 s for a file


@pytest.mark.slow
def test_what_is_here_needs_no_network(hub: dict[str, str]) -> None:
    refs = ["hf:owner/repo/tiny-Q8_0.gguf", "hf:owner/repo/split/big-00002-of-00003.gguf"]
    refs += ["hf:owner/repo:Q8_0", "hf:owner/folder"]
    here = fetch(hub, *refs)
    again = fetch(hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}, *refs)
    assert [(a.path, a.error, a.n_waits) for a in again] == [(h.path, "", 0) for h in here]


def test_any_shard_brings_all_of_them(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, "hf:owner/repo/split/big-00002-of-00003.gguf")
    assert ended.path is not None
    assert ended.path.name == "big-00001-of-00003.gguf"
    assert sorted(path.name for path in ended.path.parent.iterdir()) == [
        f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]


HINTS = {
    "hf:owner/repo/tiny-Q8.gguf": "no such file; did you mean tiny-Q8_0.gguf?",
    "hf:owner/repo": "holds several models; available: tiny-Q8_0.gguf (10 B), split/",
    "hf:owner/repo@v9": "has no revision 'v9'",
    "hf:owner/absent/x.gguf": "no such repository; if it is private, log in with",
    "hf:owner/type-GGUF": "no such repository; did you mean hf:owner/types-GGUF?",
    "hf:owner/types-GGUF:Q5_K_M": "has no Q5_K_M; available: Q8_0 (8.0 GiB), Q4_K_M (4.0 GiB)",
    "hf:owner/types-GGUF/nowhere": "has no folder 'nowhere'",
    "hf:owner/images": "has no GGUF model, nor config.json and safetensors",
    "hf:owner/folder:Q8_0": "has no GGUF model, so no Q8_0",
    "hf:owner/gated": "is gated: accept its licence at http",
    "hf:x.gguf": "expected hf:OWNER/REPO, hf:OWNER/REPO:Q4_K_M or hf:OWNER/REPO/FILE.gguf",
}


def test_what_is_not_there(hub: dict[str, str]) -> None:
    for (ref, hint), ended in zip(HINTS.items(), fetch(hub, *HINTS), strict=True):
        assert ended.path is None
        assert ended.error.startswith(f"FileError: {ref}: ")
        assert hint in ended.error
        assert "\n" not in ended.error


def test_a_repository_alone_means_its_best_type_that_fits(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, ("hf:owner/types-GGUF", 8, 64))
    assert ended.read() == b"GGUF four"
    assert ended.said == [
        "hf:owner/types-GGUF: types-Q4_K_M.gguf, 4.0 GiB, the best of 4 types that fits into "
        "8.0 GiB of free memory; another: hf:owner/types-GGUF:TYPE"
    ]


def test_with_plenty_of_memory_it_is_the_one_whose_loss_is_nothing(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, "hf:owner/types-GGUF")
    assert ended.path is not None
    assert ended.path.name == "types-Q8_0.gguf"
    assert "smaller and faster: hf:owner/types-GGUF:Q4_K_M (4.0 GiB)" in ended.said[0]


@pytest.mark.slow
def test_what_is_here_is_taken_before_anything_else(hub: dict[str, str]) -> None:
    """Else the same command would download another file when memory is short, or free."""
    (ended,) = fetch(hub, "hf:owner/types-GGUF:q4_k_m")
    before = downloads()
    asks: list[Ask] = [("hf:owner/types-GGUF", 64, 64), ("hf:owner/types-GGUF", 2, 64)]
    for env in (hub, hub | {"HF_HUB_OFFLINE": "1"}):
        for again in fetch(env, *asks):
            assert again.path == ended.path
            assert "types-Q4_K_M.gguf, downloaded before; another: " in again.said[0]
    assert downloads() == before


def test_the_disk_is_checked_before_a_named_file_too(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, ("hf:owner/types-GGUF/types-Q8_0.gguf", 64, 1))
    assert "the download needs 8.0 GiB, but " in ended.error
    assert "has only 1.0 GiB free: free some space, or set HF_HOME" in ended.error
    assert downloads() == []


def with_projector(ref: str, wanted: Eyes = None, memory: float = 64) -> Ask:
    return ref, memory, 64, True, wanted


def test_the_projector_comes_with_the_model(hub: dict[str, str]) -> None:
    """The one of F16, once; it lies where ``load`` finds it."""
    (ended,) = fetch(hub, with_projector("hf:owner/eyes-GGUF"))
    assert ended.read() == b"GGUF eight"
    assert ended.path is not None
    (beside,) = projectors_beside(ended.path)
    assert beside.read_bytes() == b"GGUF f16"
    assert ended.said[1:] == [
        "hf:owner/eyes-GGUF: mmproj-F16.gguf, 8 B, with which the model reads pictures"
    ]
    assert len(downloads()) == 2
    for wanted in (None, True, False):
        (again,) = fetch(
            hub | {"HF_HUB_OFFLINE": "1"}, with_projector("hf:owner/eyes-GGUF", wanted)
        )
        assert again.path == ended.path


def test_a_projector_that_is_not_wanted_is_not_downloaded(hub: dict[str, str]) -> None:
    for ref in ("hf:owner/eyes-GGUF", "hf:owner/eyes-GGUF/BF16"):
        (ended,) = fetch(hub, with_projector(ref, wanted=False))
        assert ended.path is not None
        assert projectors_beside(ended.path) == []
    assert not any("mmproj" in path for path in downloads())


def test_a_projector_comes_later_where_it_is_needed(hub: dict[str, str]) -> None:
    """Of a model that was downloaded without it the hub is not asked, unless a picture is read."""
    refs = ["hf:owner/eyes-GGUF", "hf:owner/eyes-GGUF/eyes-Q8_0.gguf"]
    fetch(hub, refs[0])
    Hub.requests.clear()
    for ended in fetch(hub, *map(with_projector, refs)):
        assert ended.path is not None
        assert projectors_beside(ended.path) == []
    assert Hub.requests == []
    for ref in refs:
        (ended,) = fetch(hub, with_projector(ref, wanted=True))
        assert ended.path is not None
        (beside,) = projectors_beside(ended.path)
        assert beside.name == "mmproj-F16.gguf"
        beside.unlink()


def test_shards_in_a_folder_find_the_projector_above(hub: dict[str, str]) -> None:
    refs = ["hf:owner/eyes-GGUF/BF16", "hf:owner/eyes-GGUF/BF16/eyes-BF16-00001-of-00002.gguf"]
    for ref, wanted in zip(refs, (None, True), strict=True):
        (ended,) = fetch(hub, with_projector(ref, wanted))
        assert ended.path is not None
        assert ended.path.parent.name == "BF16"
        (beside,) = projectors_beside(ended.path)
        assert beside == ended.path.parents[1] / "mmproj-F16.gguf"
        beside.unlink()


def test_a_file_that_is_not_there_brings_no_projector(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, with_projector("hf:owner/eyes-GGUF/eyes-Q9_0.gguf", wanted=True))
    assert "no such file; did you mean eyes-Q8_0.gguf?" in ended.error
    assert not any("mmproj" in path for path in downloads())


def test_memory_is_for_the_projector_too(hub: dict[str, str], monkeypatch: Any) -> None:
    """5.6 GiB are enough for the model of 4 GiB, but not beside a projector of 1 GiB."""
    monkeypatch.setitem(SIZES, "mmproj-types-F16.gguf", GIB)
    ref = "hf:owner/types-GGUF"
    seeing, alone = fetch(hub, with_projector(ref, memory=5.6), (ref, 5.6, 64))
    assert alone.path is not None
    assert alone.path.name == "types-Q4_K_M.gguf"
    assert "only types below 3 bits fit" in seeing.error


def test_a_projector_alone(hub: dict[str, str]) -> None:
    refs = ["hf:owner/eyes-GGUF", "hf:owner/eyes-GGUF/mmproj-Q8_0.gguf", "hf:owner/types-GGUF"]
    found = fetch(hub, *(with_projector(ref, "alone") for ref in refs))
    assert [ended.read() for ended in found] == [b"GGUF f16", b"GGUF q8", b"GGUF eye"]
    (ended,) = fetch(hub, with_projector("hf:owner/rwkv6-GGUF", "alone"))
    assert "has no projector file" in ended.error


def test_where_none_fits_all_are_listed(hub: dict[str, str]) -> None:
    repo = "hf:owner/types-GGUF"
    none, coarse, named = fetch(hub, (repo, 1, 64), (repo, 2, 64), (f"{repo}:Q8_0", 2, 64))
    assert "1.0 GiB of memory is free, and the smallest model needs about 1.0 GiB" in none.error
    assert "IQ2_M (12 B), Q4_K_M (4.0 GiB), Q8_0 (8.0 GiB)" in none.error
    assert f"name one as {repo}:IQ2_M" in none.error
    assert "only types below 3 bits fit" in coarse.error
    assert named.read() == b"GGUF eight"  # asked for by name


def test_a_folder_and_a_type_in_shards(hub: dict[str, str]) -> None:
    for ended in fetch(hub, "hf:owner/types-GGUF/IQ2_M", "hf:owner/types-GGUF@main:iq2_m"):
        assert ended.path is not None
        assert ended.path.name == "types-IQ2_M-00001-of-00002.gguf"
        assert (ended.path.parent / "types-IQ2_M-00002-of-00002.gguf").read_bytes() == b"GGUF 2"


def test_a_disk_without_room_is_said_before_the_download(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, ("hf:owner/types-GGUF", 64, 2))
    assert "the download needs 8.0 GiB, but " in ended.error
    assert "has only 2.0 GiB free: free some space, or set HF_HOME to another folder" in ended.error
    assert downloads() == []


@pytest.mark.slow
def test_safetensors_are_a_folder_to_use_in_place(hub: dict[str, str]) -> None:
    short, ended = fetch(hub, ("hf:owner/folder", 2, 64), "hf:owner/folder")
    assert "look for a repository like hf:owner/folder-GGUF" in short.error
    folder = ended.path
    assert folder is not None
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert sorted(path.as_posix() for path in found) == [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "modules.json",
        "tokenizer.json",
    ]
    assert "2 safetensors files, 2.0 GiB, used as they are" in ended.said[0]
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    assert fetch(offline, "hf:owner/folder")[0].path == folder
    (folder / "model-2.safetensors").unlink()  # as an interrupted download leaves it
    assert "HF_HUB_OFFLINE forbids a download" in fetch(offline, "hf:owner/folder")[0].error


@pytest.mark.slow
def test_what_is_converted_need_not_fit_memory(hub: dict[str, str], tmp_path: Path) -> None:
    """``treadle convert`` reads in strips. The config.json here is empty, which it says."""
    (ended,) = fetch(hub, ("hf:owner/folder", 2, 64, False))
    assert ended.path is not None
    ran = subprocess.run(
        [sys.executable, "-m", "treadle", "convert", "hf:owner/folder", tmp_path / "x.gguf"],
        cwd=ROOT,
        env=hub | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "model_type: is missing" in ran.stderr


def test_another_architecture_is_refused_before_the_download(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub, "hf:owner/rwkv6-GGUF")
    assert ended.error.startswith(
        "UnsupportedError: hf:owner/rwkv6-GGUF: architecture 'rwkv6' is not "
    )
    assert downloads() == []


def test_a_token_that_is_refused(hub: dict[str, str]) -> None:
    (ended,) = fetch(hub | {"HF_TOKEN": "hf_wrong"}, "hf:owner/repo/tiny-Q8_0.gguf")
    assert "rejects your token: log in with 'hf auth login'" in ended.error


def test_the_command_line_says_it_in_one_line(hub: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "treadle", "inspect", "hf:owner/repo/tiny-Q8_0.gguf"],
        cwd=ROOT,
        env=hub,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "tiny-Q8_0.gguf" in ended.stderr  # not a model: the reader says so, and names the file
    assert ended.stderr.count("\n") == 1
