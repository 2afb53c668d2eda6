"""``treadle convert`` as a user meets it."""

from __future__ import annotations

import json
import mmap
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.cli.conftest import Run
from tests.convert.test_output import write_model
from tests.models.hf_cases import CASES, Case
from tests.models.hf_tiny import build, require_transformers
from tests.reference import kl_divergence
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.kernels.matmul.select_activation import prefers_q16

ROOT = Path(__file__).resolve().parent.parent.parent


def start(*args: str | Path, **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "treadle", "convert", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, **how)


def test_mtp_layers_of_no_folder(run: Run, data: Path, tmp_path: Path) -> None:
    source = str(data / "models" / "stories260K_split")
    out = str(tmp_path / "mtp.gguf")
    ran = run("convert", source, out, "--mtp")
    assert ran.code == 1
    assert "--mtp: expected a Hugging Face folder" in ran.err
    ran = run("convert", source, out, "--mtp", "--mmproj", out)
    assert ran.code == 2
    assert "exclude each other" in ran.err
    assert not list(tmp_path.iterdir())


def test_shards_to_one_file(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.gguf"
    ran = run("convert", str(data / "models" / "stories260K_split"), str(out))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{out}  1.1 MiB\n"
    assert out.read_bytes() == (data / "models" / "stories260K.gguf").read_bytes()
    again = run("convert", str(data / "models" / "stories260K_split"), str(out))
    assert again.code == 1
    assert again.err == f"treadle: error: {out}: exists already (expected --force to replace it)\n"
    assert run("convert", str(data / "models" / "stories260K_split"), str(out), "--force").code == 0


def test_json(run: Run, data: Path, tmp_path: Path) -> None:
    source = data / "models" / "babyllama105" / "model5000.bin"
    out = tmp_path / "b.gguf"
    ran = run(
        "convert",
        str(source),
        str(out),
        "--type",
        "q8_0",
        "--align",
        "page",
        "--json",
        "--split-max-size",
        "500K",
        "--set",
        "general.name=baby",
    )
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["kind"] == "a version 0 llama2.c checkpoint"
    files = [Path(file["path"]) for file in said["files"]]
    assert [p.name for p in files] == [f"b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert [p.stat().st_size for p in files] == [file["n_bytes"] for file in said["files"]]
    with open_gguf(files[0]) as made:
        assert made.alignment == mmap.PAGESIZE
        assert made.metadata["general.name"] == "baby"
        assert {t.type_name for t in made.tensors.values()} == {"Q8_0", "F32"}


@pytest.mark.parametrize("most", [60_000, 131_072, 200_000, 300_000, 500_000, 1_000_000])
def test_shards_are_as_small_as_was_asked(most: int, run: Run, data: Path, tmp_path: Path) -> None:
    """Their headers count: of the first all keys, the vocabulary too. A tensor is not split."""
    source = data / "models" / "stories260K.gguf"
    out = tmp_path / "m.gguf"
    ran = run("convert", str(source), str(out), "--split-max-size", str(most), "--json")
    assert ran.code == 0
    files = [Path(file["path"]) for file in json.loads(ran.out)["files"]]
    assert len(files) > 1
    with open_gguf(source) as before, open_gguf(files[0]) as after:
        assert list(after.tensors) == list(before.tensors)
        for name, tensor in before.tensors.items():
            assert after.tensors[name].data.tobytes() == tensor.data.tobytes()
        held = [tensor.path for tensor in after.tensors.values()]
    over = [path for path in files if path.stat().st_size > most]
    assert all(held.count(path) == 1 for path in over)
    assert bool(over) == ("more than" in ran.err) == (most <= 131_072)


def test_what_was_assumed_is_said(run: Run, data: Path, tmp_path: Path) -> None:
    (source,) = (data / "legacy").glob("*.ggml.bin")
    ran = run("convert", str(source), str(tmp_path / "v.gguf"))
    assert ran.code == 0
    assert ran.err.startswith("treadle: GGJT files store neither the norm epsilon")


def test_what_llama_cpp_reads_otherwise_is_said(run: Run, tmp_path: Path) -> None:
    require_transformers()
    case = Case("Mistral", "llama", {"head_dim": 32, "sliding_window": 16})
    build(case).save_pretrained(tmp_path / "model")
    ran = run("convert", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--json")
    assert ran.code == 0
    (note,) = json.loads(ran.out)["notes"]
    assert note.startswith("llama.cpp will read this file differently: it has no sliding window")
    assert f"treadle: {note}\n" in ran.err


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--type", "Q9"), "unknown weight format 'Q9'"),
        (("--align", "48"), "'48' is neither a power of two nor 'page'"),
        (("--split-max-size", "2T"), "'2T' is not a size, such as 500M or 2G"),
    ],
)
def test_wrong_usage(
    run: Run, data: Path, tmp_path: Path, args: tuple[str, str], what: str
) -> None:
    source = data / "models" / "stories260K.gguf"
    ran = run("convert", str(source), str(tmp_path / "x.gguf"), *args)
    assert ran.code == 2
    assert what in ran.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint(run: Run, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    (nothing := tmp_path / "nothing.bin").touch()
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / "x.gguf")
    for source, what in (
        (text, "notes.txt: starts with b'hello'"),
        (nothing, "nothing.bin: an empty file"),
        (tmp_path / "gone", "gone: no such file"),
        (loop, "loop.gguf: "),
        (tmp_path / "empty", "empty: is a folder that contains no model"),
        (data / "quant" / "tiny-rwkv-5v1-730K-FP16.bin", "GGMF version 101 is not a llama file"),
        (data / "malformed" / "seed1_DATA_NOT_ENOUGH_DATA__reject.gguf", "cut short"),
    ):
        ran = run("convert", str(source), out)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("treadle: error: "), ran.err
        assert what in ran.err
    ran = run("convert", str(data / "models" / "stories260K.gguf"), str(tmp_path / "no" / "x.gguf"))
    assert "no: no such folder" in ran.err
    there = ["empty", "loop.gguf", "notes.txt", "nothing.bin"]
    assert sorted(p.name for p in tmp_path.iterdir()) == there


def test_every_malformed_file_is_an_error_or_a_file(run: Run, data: Path, tmp_path: Path) -> None:
    for i, source in enumerate(sorted((data / "malformed").glob("*.gguf"))):
        out = tmp_path / f"{i}.gguf"
        ran = run("convert", str(source), str(out), "--allow-nonfinite")
        assert ran.code in (0, 1), source.name
        assert out.exists() == (ran.code == 0)
        if source.name.endswith("__reject.gguf"):
            assert ran.code == 1, source.name
            assert str(source) in ran.err
    assert not list(tmp_path.glob(".*"))


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """Refused by the kernel before anything is written."""
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    target.write_bytes(b"mine")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    ended = start(source, target, "--force", preexec_fn=limit)
    assert ended.returncode == 1
    assert f"error: {target}: the file would exceed the maximum file size" in ended.stderr.decode()
    assert target.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


FULL = """
set -e
mount -t tmpfs -o size=200k none "$DISK"
treadle() { "$PYTHON" -c "$PROGRAM" convert "$SOURCE" "$DISK/b.gguf"; }
treadle && exit 90
test ! -e "$DISK/b.gguf"
ls -A "$DISK"
mount -o remount,size=10m "$DISK"
treadle
cmp "$SOURCE" "$DISK/b.gguf"
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A real one, which fills up in the middle; when it has grown, the rest follows."""
    own = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(own, capture_output=True).returncode:
        pytest.skip("no file systems of one's own here")
    source = write_model(tmp_path / "a.gguf")
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (  # nobody says beforehand that there is no room
        "import sys; from treadle.convert import partial_file, writer; partial_file.SYNC = 1;"
        "writer._Writer._check_room = lambda self, parts: None;"
        "from treadle.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    env = {"DISK": str(disk), "PYTHON": sys.executable, "SOURCE": str(source), "PROGRAM": program}
    ended = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", FULL],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        env=os.environ | env,
    )
    errors = ended.stderr.decode()
    assert ended.returncode == 0, errors
    assert f"error: {disk}/b.gguf: the disk is full; partial output kept" in errors
    assert ".b.gguf.part\n.b.gguf.part.journal\n" in ended.stdout.decode()
    assert "treadle: resuming: " in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle(tmp_path: Path, number: int) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    program = (
        "import os, sys; from treadle.convert import partial_file; partial_file.SYNC = 1;"
        "add = partial_file.Journal.add\n"
        "def dies(self, index, n):\n"
        "    add(self, index, n)\n"
        f"    if index == 4: os.kill(os.getpid(), {int(number)})\n"
        "partial_file.Journal.add = dies\n"
        "from treadle.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(target)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert ended.returncode == (130 if number == signal.SIGINT else -number), ended.stderr
    assert not target.exists()
    ended = start(source, target)
    assert ended.returncode == 0
    assert ended.stderr == b"treadle: resuming: 5 of 12 tensors are already written\n"
    assert target.read_bytes() == source.read_bytes()


def test_weights_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    out = tmp_path / "b.gguf"
    writer = GGUFWriter(source)
    writer.add_tensor("blk.7.ffn_up.weight", (1, 32), "F32", np.full((1, 32), np.nan, np.float32))
    writer.write()
    ran = run("convert", str(source), str(out))
    assert ran.code == 1
    assert f"{source}: blk.7.ffn_up.weight: holds a weight that is not finite" in ran.err
    assert not out.exists()
    assert run("convert", str(source), str(out), "--allow-nonfinite").code == 0
    assert out.read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_a_bar_for_who_watches_and_none_in_a_pipe(tmp_path: Path) -> None:
    """On a terminal: bytes, their rate, the time that is left."""
    source = write_model(tmp_path / "a.gguf")
    assert start(source, tmp_path / "b.gguf").stderr == b""
    program = (
        "import sys, time; from treadle.cli.ui import progress; progress.PATIENCE_S = 0;"
        "from treadle.convert import writer; writer.COPY = 4096;"
        "check = writer._Coder.check\n"
        "def slow(self, *args):\n"
        "    time.sleep(0.01); check(self, *args)\n"
        "writer._Coder.check = slow\n"
        "from treadle.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "c.gguf")]
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs, stdout=subprocess.PIPE, env=env)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # the terminal ends with its last writer
        pass
    finally:
        os.close(ours)
    assert process.communicate(timeout=60)[0].startswith(bytes(tmp_path / "c.gguf"))
    assert process.returncode == 0
    text = seen.decode()
    assert "converting" in text
    assert "B/s" in text
    assert "0:0" in text  # time left


def test_a_hugging_face_folder(run: Run, tmp_path: Path) -> None:
    """The logits of the folder run in place; in another type, weights as that has them."""
    require_transformers()
    import torch

    folder = tmp_path / "hf"
    out = tmp_path / "x.gguf"
    small = tmp_path / "q.gguf"
    model = build(CASES["llama3"])
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    assert run("convert", str(folder), str(out)).code == 0
    ids = list(range(3, 40))
    with treadle.load(folder, threads=1) as a, treadle.load(out, threads=1) as b:
        # q and k in another order; with words a last bit may become a step of an activation.
        bound = 2e-6 if prefers_q16(by_name("BF16"), a.isa) else 1e-7
        assert kl_divergence(a.logits(ids), b.logits(ids)) < bound
    assert run("convert", str(folder), str(small), "--type", "Q8_0").code == 0
    with open_gguf(out) as made, open_gguf(small) as quantized:
        assert made.tensors.keys() == quantized.tensors.keys()
        for name, tensor in made.tensors.items():
            if len(tensor.shape) == 1:
                assert tensor.type_name == quantized.tensors[name].type_name == "F32"
                assert quantized.tensors[name].data.tobytes() == tensor.data.tobytes()
            else:
                assert tensor.type_name == "BF16"
                wanted = by_name("Q8_0").quantize_rows(tensor.dequantize())
                assert quantized.tensors[name].data.tobytes() == wanted.tobytes(), name


def test_an_index_that_points_elsewhere(run: Run, tmp_path: Path) -> None:
    require_transformers()
    folder = tmp_path / "hf"
    build(CASES["llama"]).save_pretrained(folder, max_shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name = next(iter(said["weight_map"]))
    said["weight_map"][name] = "../model.safetensors"
    index.write_text(json.dumps(said))
    ran = run("convert", str(folder), str(tmp_path / "x.gguf"))
    assert ran.code == 1
    assert f"{index}: {name}: is listed in '../model.safetensors'" in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("foo", 2, "--set 'foo': expected KEY=VALUE"),
        ("=1", 2, "expected KEY=VALUE"),
        ("llama.context_length=-5", 1, "llama.context_length=-5: expected uint32, from 0 to"),
        ("llama.context_length=abc", 1, "llama.context_length=abc: expected uint32, from 0 to"),
        ("llama.context_length=true", 1, "expected uint32"),
        ("llama.attention.layer_norm_rms_epsilon=x", 1, "epsilon=x: expected a number"),
        ("llama.attention.layer_norm_rms_epsilon=1e300", 1, "expected a number"),
        ("tokenizer.ggml.tokens=7", 1, "expected a key that is not an array"),
    ],
)
def test_settings_keep_the_type_of_their_key(
    text: str, code: int, message: str, run: Run, data: Path, tmp_path: Path
) -> None:
    source = str(data / "models" / "babyllama105" / "babyllama105-Q5_0.gguf")
    ran = run("convert", source, str(tmp_path / "x.gguf"), "--set", text)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []
