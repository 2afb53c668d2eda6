"""The script that makes the model inside the package, run on a toy, and the model that it made."""

from __future__ import annotations

import json
import math
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import forward
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config
from treadle.tokenizer.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "treadle" / "data" / "demo.gguf"
TEXT = "def f(n):\n        return n + 1\n\n\nclass Σtack:  # naïve\n"

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """tools/train_demo.py as a module, PyTorch's settings put back afterwards. Python's library is
    read and split once: it is what it was when the next run of the tool reads it.
    """
    sys.path.insert(0, str(ROOT / "tools"))
    threads = torch.get_num_threads()
    try:
        import demo_data  # type: ignore[import-not-found]
        import train_demo  # type: ignore[import-not-found]

        documents = demo_data.read_library()
        train, held_out = demo_data.split(documents)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo_data, "read_library", lambda: documents)
            patch.setattr(demo_data, "split", lambda _: (list(train), list(held_out)))
            yield train_demo
    finally:
        sys.path.remove(str(ROOT / "tools"))
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="module")
def straight(tool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run of three steps: demo.gguf, the log, a checkpoint."""
    folder = tmp_path_factory.mktemp("straight")
    run(tool, folder, "--steps", "3")
    return folder


@pytest.fixture(scope="module")
def grown(tool: Any, straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one step of the stage after it."""
    folder = tmp_path_factory.mktemp("grown")
    run(tool, folder, "--steps", "1", "--start", str(straight / "demo.gguf"))
    return folder


@pytest.fixture(scope="module")
def library(tool: Any) -> tuple[list[Any], list[Any]]:
    """Training and held-out documents of this Python's library."""
    data = sys.modules["demo_data"]
    train, held_out = data.split(data.read_library())
    return train, held_out


def run(tool: Any, folder: Path, *args: str) -> None:
    assert (
        tool.main(["--tiny", "--out", str(folder / "demo.gguf"), "--work", str(folder), *args]) == 0
    )


# -- the run --------------------------------------------------------------------------------


def test_the_same_run_again_makes_the_same_file(tool: Any, straight: Path, tmp_path: Path) -> None:
    run(tool, tmp_path, "--steps", "3")
    assert (tmp_path / "demo.gguf").read_bytes() == (straight / "demo.gguf").read_bytes()


def test_a_stopped_and_resumed_run_makes_the_same_file(
    tool: Any, straight: Path, tmp_path: Path
) -> None:
    run(tool, tmp_path, "--steps", "3", "--stop", "2")
    assert not (tmp_path / "demo.gguf").exists()
    run(tool, tmp_path, "--steps", "3", "--resume")
    assert (tmp_path / "demo.gguf").read_bytes() == (straight / "demo.gguf").read_bytes()


def test_a_checkpoint_of_another_recipe_is_refused(
    tool: Any, straight: Path, tmp_path: Path
) -> None:
    checkpoint = torch.load(straight / "checkpoint.pt", weights_only=True)
    torch.save({**checkpoint, "identity": "another"}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="another recipe"):
        run(tool, tmp_path, "--steps", "3", "--resume")


def test_the_report_measures_the_rounded_file(straight: Path) -> None:
    last = json.loads((straight / "log.jsonl").read_text().splitlines()[-1])
    exact = last["float32"]
    rounded = last["rounded"]
    assert exact["loss"] == pytest.approx(rounded["loss"], abs=0.01)
    assert exact["perplexity"] == pytest.approx(math.exp(exact["loss"]))
    assert exact["loss"] < math.log(288)  # better than knowing nothing
    bits = exact["loss"] / math.log(2) * exact["n_tokens"] / exact["n_bytes"]
    assert exact["bits_per_byte"] == pytest.approx(bits)
    assert last["file_bytes"] == (straight / "demo.gguf").stat().st_size


def test_the_rate_warms_up_stays_and_ends_at_zero(tool: Any) -> None:
    rates = [tool.rate_at(tool.DEMO, step, 1000) for step in range(1001)]
    assert rates[0] == 1 / tool.DEMO.warmup
    assert set(rates[tool.DEMO.warmup : 501]) == {1.0}
    assert rates[500:] == sorted(rates[500:], reverse=True)
    assert rates[-1] == 0


def test_windows_cover_the_stream_evenly(tool: Any) -> None:
    n = 10_000
    text = tool.Text(None, {"library": [np.arange(n, dtype=np.uint16)] * 2}, [], "")
    recipe = tool.SMALL
    phase = tool.phase_at(recipe, 0, 40)
    seen = np.zeros(n, int)
    for step in range(40):
        ids, targets = tool.batch_of(recipe, text, step, phase)
        assert ids.shape == (recipe.batch_tokens // phase.context, phase.context)
        assert torch.equal(ids + 1, targets)
        np.add.at(seen, ids.numpy().ravel(), 1)
    mean = 40 * recipe.batch_tokens / n
    inside = seen[phase.context : -phase.context - 1]
    assert abs(inside - mean).max() < 0.2 * mean


def test_phases_begin_at_their_share_of_the_steps(tool: Any) -> None:
    recipe = tool.DEMO
    found = [tool.phase_at(recipe, step, 100) for step in range(100)]
    for phase in recipe.phases:
        assert found.index(phase) == phase.start * 100
    assert found[-1].context == recipe.size.n_ctx


def losses(folder: Path) -> dict[str, Any]:
    """The last line of a run's log."""
    found: dict[str, Any] = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    return found


def test_each_stage_goes_on_from_the_one_before(
    tool: Any, straight: Path, grown: Path, tmp_path: Path
) -> None:
    first, second = losses(straight), losses(grown)
    assert second["parameters"] > first["parameters"]
    assert second["float32"]["loss"] < first["rounded"]["loss"]  # it went on, not from nothing
    run(tool, tmp_path, "--steps", "1", "--start", str(grown / "demo.gguf"))
    third = losses(tmp_path)
    assert third["parameters"] == second["parameters"]
    assert third["float32"]["loss"] < second["rounded"]["loss"]


def test_a_stage_of_more_layers(tool: Any, grown: Path, tmp_path: Path) -> None:
    run(tool, tmp_path, "--steps", "1", "--deeper", "--start", str(grown / "demo.gguf"))
    with open_gguf(tmp_path / "demo.gguf") as gguf:
        assert load_config(gguf).n_layer == 3
    assert losses(tmp_path)["float32"]["loss"] < losses(grown)["rounded"]["loss"]
    with pytest.raises(SystemExit, match="not the file of an earlier stage"):
        run(tool, tmp_path, "--steps", "1", "--deeper", "--start", str(tmp_path / "demo.gguf"))


def test_a_file_of_no_stage_is_refused(tool: Any, straight: Path) -> None:
    with pytest.raises(SystemExit, match="not the file of an earlier stage"):
        tool.recipe_of(straight / "demo.gguf", tiny=False)


@pytest.mark.usefixtures("tool")
@pytest.mark.parametrize(("n_layer", "n_ff"), [(2, 80), (3, 48), (5, 80)])
def test_a_grown_model_computes_the_same(n_layer: int, n_ff: int) -> None:
    model = sys.modules["demo_model"]
    small = model.Size(96, 2, 32, 48, 2, 1, 16)
    large = model.Size(96, n_layer, 32, n_ff, 2, 1, 16)
    weights = {
        stem: value + 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3))
        for stem, value in model.initial_weights(small, 1).items()
    }
    grown = model.grow(weights, model.initial_weights(large, 2))
    ids = torch.arange(16)[None] * 5
    rope = model.rope_table(small, 16)
    before = model.forward(weights, small, ids, rope, None, torch.float32)
    after = model.forward(grown, large, ids, rope, None, torch.float32)
    assert {stem: v.shape for stem, v in grown.items()} == {
        stem: v.shape for stem, v in model.initial_weights(large, 2).items()
    }
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


# -- the text -------------------------------------------------------------------------------


def test_nothing_held_out_is_trained_on(library: tuple[list[Any], list[Any]]) -> None:
    train, held_out = library
    assert not {document.path for document in train} & {document.path for document in held_out}
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in [*train, *held_out])
    assert 0.005 < share < 0.08  # about 3 %, by the hash and the Python version
    seen = {line.strip() for document in train for line in document.text.splitlines()}
    for document in held_out:
        lines = [line.strip() for line in document.text.splitlines() if len(line.strip()) > 24]
        assert sum(line in seen for line in lines) <= 0.13 * len(lines)


@pytest.mark.usefixtures("tool")
def test_texts_that_repeat_others_or_a_held_out_file_are_left_out() -> None:
    data = sys.modules["demo_data"]

    def document(name: str, lines: list[str]) -> Any:
        return data.Document(name, "\n".join(f"{line} = some_quite_long_name" for line in lines))

    held_out = [document("held.py", [f"secret_{i}" for i in range(20)])]
    fresh = document("fresh.py", [f"own_{i}" for i in range(20)])
    copy = document("copy.py", [f"own_{i}" for i in range(10)])
    leak = document("leak.py", [f"secret_{i}" for i in range(4)] + [f"x_{i}" for i in range(90)])
    idiom = document("idiom.py", ["secret_1", *(f"import_{i}" for i in range(20))])
    kept = data.distinct([fresh, copy, leak, idiom], held_out)
    assert [d.path for d in kept] == ["fresh.py", "idiom.py"]


@pytest.mark.usefixtures("tool")
def test_the_other_texts_are_sources_that_people_wrote() -> None:
    data = sys.modules["demo_data"]
    file = ROOT / "src" / "treadle" / "api/model.py"
    given = [("api/model.py", file.read_bytes()), ("demo.py", DEMO.read_bytes())]
    assert list(data._prose(given)) == [data.Document("api/model.py", file.read_text("utf-8"))]


@pytest.mark.usefixtures("tool")
def test_wheels_are_read_as_they_are(tmp_path: Path) -> None:
    data = sys.modules["demo_data"]
    text = "".join(f"value_{name} = other_value(name)\n" for name in "abcdefghijkl")
    with zipfile.ZipFile(tmp_path / "some_thing-1.2.3-py3-none-any.whl", "w") as wheel:
        for path in ("some/b.py", "some/a.py", "some/tests/c.py", "some/d.txt"):
            wheel.writestr(path, text)
    documents, versions = data.read_wheels(tmp_path)
    assert [d.path for d in documents] == ["some/a.py", "some/b.py"]
    assert {d.text for d in documents} == {text}
    assert versions == {"some_thing": "1.2.3"}


@pytest.mark.usefixtures("tool")
def test_texts_are_ordered_by_likeness() -> None:
    data = sys.modules["demo_data"]
    library = [data.Document("l.py", "def spam(eggs):\n    return eggs\n" * 9)]
    like = data.Document("like.py", "def eggs(spam):\n    return spam\n" * 3)
    mixed = data.Document("mixed.py", "def spam(model):\n    tensor.cuda(model)\n" * 3)
    other = data.Document("other.py", "tensor.cuda(device).float(model)\n" * 3)
    assert data.by_likeness([other, mixed, like], library) == [like, mixed, other]
    assert data._up_to([like, mixed, other], len(like.text) + len(mixed.text) + 1) == [like, mixed]


def test_tests_and_tables_are_left_out(library: tuple[list[Any], list[Any]]) -> None:
    paths = [document.path for documents in library for document in documents]
    assert "json/decoder.py" in paths
    assert not [path for path in paths if {"test", "site-packages"} & set(path.split("/"))]


@pytest.mark.usefixtures("tool")
def test_a_stream_holds_every_text_and_varies_with_its_seed(
    library: tuple[list[Any], list[Any]],
) -> None:
    data = sys.modules["demo_data"]
    documents = library[0][:8]
    tokenizer = data.train_tokenizer(documents, 288)
    first, same, other = (data.make_stream(documents, tokenizer, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    texts = tokenizer.decode(first.tolist(), skip_special_tokens=False).split(data.BOS)
    assert not texts[0]
    assert all(text.endswith(data.EOS) for text in texts[1:])
    for document in documents:  # whole, or without its docstring
        assert any(document.text.endswith(text.removesuffix(data.EOS)) for text in texts[1:])


# -- the file -------------------------------------------------------------------------------


def test_the_file_is_sound_and_describes_itself(straight: Path) -> None:
    with open_gguf(straight / "demo.gguf") as gguf:
        config = load_config(gguf)
        assert (config.arch.name, config.n_layer, config.tied) == ("llama", 2, True)
        assert gguf.metadata["general.name"] == "treadle-demo"
        assert gguf.metadata["general.license"] == "PSF-2.0"
        assert "standard library" in str(gguf.metadata["general.dataset.0.name"])
        assert "general.dataset.1.name" not in gguf.metadata
        kinds = {t.format.name for t in gguf.tensors.values() if t.format and len(t.shape) == 2}
        assert kinds == {"Q4_0"}  # rows of 64 and 96: no multiple of Q4_K's 256


def test_treadle_tokenizes_as_the_trainer_did(straight: Path) -> None:
    from tokenizers import Tokenizer

    [saved] = straight.glob("tokenizer-*.json")
    with open_gguf(straight / "demo.gguf") as gguf:
        tokenizer = load_tokenizer(gguf)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos
    assert ids[1:] == Tokenizer.from_file(str(saved)).encode(TEXT).ids
    assert tokenizer.decode(ids[1:]) == TEXT


def test_the_file_computes_what_was_trained(tool: Any, straight: Path, tmp_path: Path) -> None:
    """Random weights, for those of three steps hardly attend; it proves RoPE's reordering."""
    model = sys.modules["demo_model"]
    file = sys.modules["demo_export"]
    size = tool.TINY.size
    path = tmp_path / "random.gguf"
    generator = torch.Generator().manual_seed(1)
    weights = {
        stem: torch.randn(value.shape, generator=generator) * (0.2 if value.ndim == 3 else 1.0)
        for stem, value in model.initial_weights(size, 1).items()
    }
    [saved] = straight.glob("tokenizer-*.json")
    tokenizer = file.Tokenizer.from_file(str(saved))
    file.export(path, weights, size, tokenizer, {"name": "random"})
    ids = [0, 5, 280, 17, 99, 254, 17, 99]
    rope = model.rope_table(size, len(ids))
    rounded = file.read_back(path, size)
    ours = model.forward(rounded, size, torch.tensor([ids]), rope, None, torch.float32)[0]
    with open_gguf(path) as gguf:
        expected = forward(gguf, load_config(gguf), ids)
    scale = np.abs(expected).max()
    assert np.abs(ours.numpy() - expected).max() < 1e-5 * scale


def test_the_shipped_model_is_small_and_llama() -> None:
    assert DEMO.stat().st_size <= 6_100_000
    with open_gguf(DEMO) as gguf:
        config = load_config(gguf)
        tokenizer = load_tokenizer(gguf)
    assert (config.arch.name, config.n_vocab, config.n_ctx_train) == ("llama", 2560, 1024)
    ids = tokenizer.encode("\n        return x\n", bos=False)
    assert [tokenizer.token_bytes(id) for id in ids][:2] == [b"\n       ", b" return"]
    assert tokenizer.decode(ids) == "\n        return x\n"
