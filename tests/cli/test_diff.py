from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.test_step_diff import rewrite, same
from tests.cli.conftest import Run
from tests.loras import draw_pairs, write_gguf
from tests.models.hf_tiny import byte_vocabulary
from tests.tiny import write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "llama.gguf"
    write_model(path, "llama")
    return path


def test_models_that_agree(run: Run, llama: Path, tmp_path: Path) -> None:
    small = rewrite(llama, tmp_path / "small.gguf", same, "Q8_0")
    ran = run("diff", str(small), str(llama), "-t", "1", "-n", "16")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"{small} against {llama}"
    assert [line.split()[0] for line in lines[2:7]] == ["token_embd", "L0", "L1", "L2", "logits"]
    assert lines[-2].endswith("of 16 tokens")
    assert lines[-1] == "no step differs by more than its tolerance"


def test_the_first_difference(run: Run, llama: Path, tmp_path: Path) -> None:
    wrong = rewrite(
        llama,
        tmp_path / "wrong.gguf",
        lambda name, rows: -rows if name == "blk.1.attn_q.weight" else rows,
    )
    files = (str(wrong), str(llama), "-t", "1")
    ran = run("diff", *files, "-p", "A text of some words", "--all")
    assert "L1.attn.qkv (q)" in ran.out
    said = "first difference: L1.attn.qkv (q): relative error 2.0e+00, tolerance 6.1e-05; the step"
    assert ran.out.splitlines()[-1].startswith(said)
    assert "before it, L1.attn.norm: 0.0e+00" in ran.out
    report = json.loads(run("diff", *files, "--json").out)
    assert report["first"]["key"] == "L1.attn.q"
    assert report["first"]["own"] == pytest.approx(2.0)
    assert [step["key"] for step in report["steps"] if step["differs"]] == ["L1.attn.q"]
    assert report["by"] == "treadle"
    assert report["n_tokens"] == 48
    report = json.loads(run("diff", *files, "--tolerance", "3", "--json").out)
    assert report["first"] is None


def test_the_text_of_a_file(run: Run, llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one two three")
    files = (str(llama), str(llama), "-t", "1", "--json")
    report = json.loads(run("diff", *files, "-f", str(text)).out)
    assert report["n_tokens"] == 20  # of a vocabulary of bytes, in which a space is three
    assert report["first"] is None
    ran = run("diff", *files, "-f", str(text), "-p", "words")
    assert (ran.code, "-p and -f exclude each other" in ran.err) == (2, True)


def test_bad_pairs(run: Run, llama: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    keys = byte_vocabulary()
    lists = {key: keys[key][:300] for key in ("tokens", "scores", "token_type")}
    write_model(small, "llama", n_vocab=300, vocabulary=keys | lists)
    ran = run("diff", str(small), str(llama), "-t", "1")
    assert ran.code == 1
    assert "different vocabularies: " in ran.err
    assert "has 300 tokens" in ran.err
    ran = run("diff", str(llama), str(llama), "--reference", "transformers", "-t", "1")
    assert ran.code == 1
    assert f"{llama}: is no Hugging Face folder" in ran.err


def test_what_an_adapter_changes_first(run: Run, llama: Path, tmp_path: Path) -> None:
    pairs = draw_pairs(llama, 4, 1, only=("attn_v",))
    some = {name: pair for name, pair in pairs.items() if name.startswith("blk.1.")}
    adapter = write_gguf(tmp_path / "adapter.gguf", some)
    files = (str(llama), str(llama), "--lora", str(adapter), "-t", "1", "--json")
    report = json.loads(run("diff", *files).out)
    assert report["first"]["key"] == "L1.attn.v"
