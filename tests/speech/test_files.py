"""Whisper files: Hugging Face folders, whisper.cpp's, CTranslate2's, and GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.speech.whisper_cases import (
    F16,
    F32,
    I8,
    folder_model,
    folder_of,
    logits_off,
    opened,
    quantised_ggml,
    truth_of,
    weights_off,
    write_ct2,
)
from treadle.cli import main
from treadle.convert.detect import find_kind
from treadle.convert.whisper.file import WhisperFile, non_speech, vocabulary_keys
from treadle.convert.whisper.languages import LANGUAGES, special_names
from treadle.convert.whisper.open import is_whisper, open_whisper
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF
from treadle.files.splits import shown_name
from treadle.speech.alignment_heads import usual_heads
from treadle.speech.read import read_parts
from treadle.tokenizer.tokenizer import load_tokenizer

TOLERANCE = 1e-5
LOGITS8 = 0.03  # with weights of 8 bits; a wrong layout is 1 off
EIGHT_BITS = 0.5 / 127 + 1e-3  # of the largest weight of a row


def converted(source: Path, target: Path, *options: str) -> Path:
    assert main(["convert", str(source), str(target), *options]) == 0
    return target


def spells(file: GGUF) -> bool:
    """Whether the tokenizer of a file reads and writes a text."""
    if isinstance(file, WhisperFile):
        file.with_merges()
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode(" the end")
    assert all(map(tokenizer.is_control, range(280, 320)))
    return len(ids) < 8 and tokenizer.decode([*ids, 286, 280]) == " the end"


@pytest.mark.parametrize("name", ["ggml.bin", "from folder", "from ggml.bin"])
def test_files_have_the_weights_of_the_folder(data: Path, tmp_path: Path, name: str) -> None:
    path = folder_of(data) / name
    if name.startswith("from "):
        source = folder_of(data) / name.removeprefix("from ").replace("folder", "")
        path = converted(source, tmp_path / "tiny.gguf")
    assert is_whisper(path)
    with folder_model(data) as truth, open_whisper(path) as file:
        assert weights_off(file, truth) == 0
        assert read_parts(file).config.n_text_ctx == 64
        assert spells(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ggml.bin", "tiny.gguf"])
def test_logits_of_files(data: Path, tmp_path: Path, name: str) -> None:
    path = folder_of(data) / name
    if name == "tiny.gguf":
        path = converted(folder_of(data), tmp_path / name)
    with opened(path) as model:
        assert logits_off(model, truth_of(data)) < TOLERANCE
        assert model.tokenizer.decode(model.tokenizer.encode(" the end")) == " the end"


@pytest.mark.slow
def test_a_quantised_gguf(data: Path, tmp_path: Path) -> None:
    path = converted(folder_of(data), tmp_path / "tiny.gguf")
    small = tmp_path / "small.gguf"
    assert main(["quantize", str(path), str(small), "Q8_0"]) == 0
    assert small.stat().st_size < 0.8 * path.stat().st_size
    with opened(small) as model:
        assert logits_off(model, truth_of(data)) < LOGITS8
        assert {tensor.type_name for tensor in model.gguf.tensors.values()} == {
            "Q8_0",
            "F16",
            "F32",
        }


@pytest.mark.parametrize(("name", "most"), [("Q8_0", EIGHT_BITS), ("Q5_0", 0.06)])
def test_a_quantised_file_of_whisper_cpp(
    data: Path, tmp_path: Path, name: str, most: float
) -> None:
    quantised_ggml(folder_of(data) / "ggml.bin", tmp_path / "ggml.bin", name)
    with folder_model(data) as truth, open_whisper(tmp_path / "ggml.bin") as file:
        assert 0 < weights_off(file, truth) < most
        assert file.tensors["dec.blk.0.attn_q.weight"].type_name == name


@pytest.mark.parametrize(("kind", "most"), [(F32, 1e-9), (F16, 1e-9), (I8, EIGHT_BITS)])
def test_a_folder_of_ctranslate2(data: Path, tmp_path: Path, kind: int, most: float) -> None:
    with folder_model(data) as truth:
        write_ct2(tmp_path / "ct2", truth, kind)
        with open_whisper(tmp_path / "ct2") as file:
            assert weights_off(file, truth) < most
            assert spells(file)
            config = read_parts(file).config
    assert config.alignment_heads == ((1, 0), (1, 3))
    assert (config.suppress, config.begin_suppress) == ((3,), (4,))
    assert config.special.languages == {"en": 282}


@pytest.mark.slow
def test_logits_of_ctranslate2_in_eight_bits(data: Path, tmp_path: Path) -> None:
    with folder_model(data) as truth:
        write_ct2(tmp_path / "ct2", truth, I8)
    with opened(tmp_path / "ct2") as model:
        assert logits_off(model, truth_of(data)) < LOGITS8
        assert model.tokenizer.decode(model.tokenizer.encode(" the end")) == " the end"


def test_ctranslate2_without_a_tokenizer(data: Path, tmp_path: Path) -> None:
    with folder_model(data) as model:
        folder = write_ct2(tmp_path / "ct2", model, F32, tokenizer=False)
    with folder_model(data) as truth, open_whisper(folder) as file:
        assert isinstance(file, WhisperFile)
        file.with_merges()  # they follow from the ranks
        ids = [load_tokenizer(each).encode(" the end in") for each in (truth, file)]
    assert ids[0] == ids[1]
    texts = json.loads((folder / "vocabulary.json").read_text())
    (folder / "vocabulary.json").unlink()
    (folder / "vocabulary.txt").write_text("\n".join(texts[:320]), "utf-8")
    with open_whisper(folder / "model.bin") as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 320  # type: ignore[arg-type]
    (folder / "vocabulary.txt").unlink()
    with pytest.raises(FileError, match="without a vocabulary"):
        open_whisper(folder)


def test_shown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_name(Path("whisper-base/model.bin")) == "whisper-base"
    assert shown_name(Path("models/whisper-base")) == "whisper-base"
    assert shown_name(Path("models/a.gguf")) == "a.gguf"
    monkeypatch.chdir(tmp_path)
    assert shown_name(Path("model.bin")) == tmp_path.name
    assert shown_name(Path("/model.bin")) == "model.bin"


def test_kinds_of_checkpoints(data: Path, tmp_path: Path) -> None:
    for path in (folder_of(data), folder_of(data) / "ggml.bin"):
        assert is_whisper(path)
        assert "Whisper" in find_kind(path).name
    assert not is_whisper(tmp_path)
    assert not is_whisper(data / "media" / "gemma3" / "text.gguf")
    assert not is_whisper(data / "media" / "gemma3")
    with pytest.raises(UnsupportedError, match="expected a Whisper model"):
        open_whisper(data / "media" / "gemma3" / "text.gguf")
    with pytest.raises(UnsupportedError, match="not a Whisper model"):
        open_whisper(data / "media" / "gemma3")
    with pytest.raises(FileError, match="no such file"):
        open_whisper(tmp_path / "absent.bin")


def test_lists_of_generation_config(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of(data), folder)
    given = {"suppress_tokens": [1, 2], "begin_suppress_tokens": [9], "alignment_heads": [[0, 1]]}
    (folder / "generation_config.json").write_text(json.dumps(given))
    with open_whisper(folder) as file:
        config = read_parts(file).config
    assert (config.suppress, config.begin_suppress) == ((1, 2), (9,))
    assert config.alignment_heads == ((0, 1),)
    (folder / "generation_config.json").write_text(json.dumps({**given, "suppress_tokens": [320]}))
    with open_whisper(folder) as file, pytest.raises(FileError, match="has 320"):
        read_parts(file)
    given["alignment_heads"] = [[2, 0]]
    (folder / "generation_config.json").write_text(json.dumps(given))
    with open_whisper(folder) as file, pytest.raises(FileError, match="head 0 of layer 2"):
        read_parts(file)


def test_whispers_vocabularies() -> None:
    sizes = {51864: (50256, 50363), 51865: (50257, 50364), 51866: (50257, 50365)}
    for n_vocab, (n_text, first_time) in sizes.items():
        keys = vocabulary_keys(["x"] * n_text, n_vocab)
        raws = keys["tokenizer.ggml.tokens"].raws()
        assert len(raws) == n_vocab
        assert raws[n_text] == b"<|endoftext|>"
        assert raws[first_time] == b"<|0.00|>"
        assert raws[-1] == b"<|30.00|>"
        assert raws[first_time - 1] == b"<|notimestamps|>"
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 100
    assert special_names(1000) == []


def test_alignment_heads_of_openais_models() -> None:
    assert usual_heads(6, 8, 51865)[:3] == ((3, 1), (4, 2), (4, 3))
    sizes = {(4, 6): 2, (6, 8): 2, (12, 12): 2, (24, 16): 2, (32, 20): 2, (4, 20): 1}
    counts = []
    for (n_layer, n_head), n in sizes.items():
        for n_vocab in (51864, 51865, 51866):
            heads = usual_heads(n_layer, n_head, n_vocab)
            assert all(layer < n_layer and head < n_head for layer, head in heads)
            counts.append(len(heads))
        all_upper = n_head * (n_layer - n_layer // 2)
        assert sum(count < all_upper for count in counts[-3:]) == n
    assert [counts[i] for i in (0, 1, 3, 4, 6, 7, 9, 10, 13, 14, 17)] == [
        *(8, 6, 5, 8, 19, 10, 18, 6, 23, 10, 6)
    ]
    assert len(usual_heads(2, 4, 320)) == 4
    assert len(usual_heads(2, 20, 51866)) == 20  # Distil-Whisper


def test_a_vocabulary_without_its_last_token() -> None:
    raws = vocabulary_keys(["x"] * 50256, 51865)["tokenizer.ggml.tokens"].raws()
    assert len(raws) == 51865
    assert raws[50256:50258] == [b"", b"<|endoftext|>"]


def test_a_folder_without_safetensors(data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(UnsupportedError, match="without safetensors"):
        open_whisper(tmp_path)


def test_symbols_are_not_speech() -> None:
    tokens = [b"#", b" #", b"a", b" -", b"\xe2\x99", b" \xe2\x99", b"\xe2", b" '", b"((", b""]
    assert non_speech(tokens, len(tokens)) == [0, 1, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("n", [3, 60, 5_000, 70_000, 300_000, 534_000])
def test_a_file_of_whisper_cpp_that_is_cut_short(data: Path, tmp_path: Path, n: int) -> None:
    path = tmp_path / "ggml.bin"
    path.write_bytes((folder_of(data) / "ggml.bin").read_bytes()[:n])
    with pytest.raises(TreadleError) as told:
        opened(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("n", [3, 20, 60, 20_000, 200_000])
def test_a_file_of_ctranslate2_that_is_cut_short(data: Path, tmp_path: Path, n: int) -> None:
    with folder_model(data) as model:
        folder = write_ct2(tmp_path / "ct2", model, F32)
    raw = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(raw[:n])
    with pytest.raises(TreadleError) as told:
        opened(folder)
    assert "ct2" in str(told.value)


def test_damaged_bytes_never_pass_unnoticed(data: Path, tmp_path: Path) -> None:
    """Bytes of heads: an error that names the file, or a model that still opens."""
    with folder_model(data) as model:
        folder = write_ct2(tmp_path / "ct2", model, F32)
    ggml = tmp_path / "ggml.bin"
    shutil.copyfile(folder_of(data) / "ggml.bin", ggml)
    random = np.random.default_rng(1)
    for path in (folder / "model.bin", ggml):
        raw = bytearray(path.read_bytes())
        for at in (*range(0, 60, 3), *random.integers(60, len(raw), 10).tolist()):
            broken = raw.copy()
            broken[at] ^= 1 << int(random.integers(8))
            path.write_bytes(broken)
            try:
                with open_whisper(path) as file:
                    read_parts(file)
            except TreadleError as error:
                assert path.name in str(error)  # noqa: PT017


def test_refused_numbers(data: Path, tmp_path: Path) -> None:
    with folder_model(data) as model:
        folder = write_ct2(tmp_path / "ct2", model, F32)
    raw = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(b"\x03" + raw[1:])
    with pytest.raises(UnsupportedError, match="version 3"):
        open_whisper(folder)
    (folder / "model.bin").write_bytes(raw.replace(b"/conv1/", b"/conv9/"))
    with pytest.raises(FileError, match="no tensor of a Whisper model"):
        open_whisper(folder)
