"""Sessions in files: the same logits afterwards, and nothing that a bad file can do."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.kvcache.test_cache import check_pages
from treadle.errors import ContextFullError, FileError, TreadleError
from treadle.files.safetensors import open_file
from treadle.kernels.attention.page_layout import KV_FORMATS, PageLayout
from treadle.kernels.run_state import PAGE
from treadle.kvcache.disk import session_file

WINDOWED = {"arch": "gemma3", "window": 16, "n_layer": 6, "tied": 0}


def text(n: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, n)]


def saved(path: Path, model: treadle.Model, ids: list[int]) -> treadle.Session:
    session = model.session()
    session.feed(ids)
    session.save(path)
    return session


@pytest.mark.parametrize("n", [1, PAGE - 1, PAGE, 5 * PAGE + 3, 1000])
@pytest.mark.parametrize("sizes", [{}, WINDOWED], ids=["llama", "window"])
def test_the_same_logits_afterwards(
    sizes: dict[str, Any], n: int, tiny: WriteTiny, tmp_path: Path
) -> None:
    """1000 tokens are more than a window's pool has room for at once."""
    path = tiny(**sizes)
    more = text(40, seed=2)
    with treadle.load(path, threads=2, context=1040) as model:
        session = saved(tmp_path / "state", model, text(n))
        expected = [session.feed([token]) for token in more]
    with treadle.load(path, threads=1, context=1100) as model:
        session = model.load_session(tmp_path / "state")
        assert session.ids == text(n)
        assert session.n_past == n
        other = model.session()  # pages are shared with who begins alike
        assert other.match([*text(n), 5]) == n // PAGE * PAGE
        other.close()
        found = [session.feed([token]) for token in more]
        assert np.array_equal(found, expected)
        check_pages(model.engine.cache, [session.seq])
        session.close()
        check_pages(model.engine.cache, [])


@pytest.mark.slow
@pytest.mark.parametrize("kv", [*KV_FORMATS, "q8_0-q5_0"])
def test_every_type_of_keys_and_values(kv: str, tiny: WriteTiny, tmp_path: Path) -> None:
    with treadle.load(tiny(**WINDOWED), threads=1, context=128, kv=kv) as model:
        session = saved(tmp_path / "state", model, text(45))
        expected = session.feed([7])
        session.close()
        model.engine.cache.forget()
        session = treadle.load_session(tmp_path / "state", model)
        assert np.array_equal(session.feed([7]), expected)
    with treadle.load(tiny(**WINDOWED), threads=1, kv="f16" if kv != "f16" else "f32") as model:
        with pytest.raises(FileError, match=rf"another KV cache format: '{kv}' \(expected f"):
            model.load_session(tmp_path / "state")
        check_pages(model.engine.cache, [])


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_what_others_left_in_the_last_page_is_not_saved(
    kv: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    layout = PageLayout(kv, 2, 32, 64)
    rng = np.random.default_rng(3)
    page = rng.integers(1, 100, 3 * layout.layer_bytes).astype(np.uint8)
    before = page.copy()
    n = 5
    layout.blank(page, n)
    for layer in range(3):
        for head in range(2):
            was, now = (
                layout.read_ref(
                    layout.head_ref(p, 0, len(p), layer * layout.layer_bytes, head).copy()
                )
                for p in (before, page)
            )
            for a, b in zip(was, now, strict=True):
                assert np.array_equal(a[:n], b[:n])
                assert not b[n:].any()
    # so the file does not depend on what a page held before
    files = []
    for seed in (5, 6):
        with treadle.load(tiny(), threads=1, context=PAGE, kv=kv) as model:
            model.logits(text(PAGE, seed))
            model.engine.cache.forget()
            saved(tmp_path / "state", model, text(3))
            files.append((tmp_path / "state").read_bytes())
    assert files[0] == files[1]


def test_the_file_is_what_the_document_says(tiny: WriteTiny, tmp_path: Path) -> None:
    from safetensors import safe_open

    with treadle.load(tiny(**WINDOWED), threads=1, context=256) as model:
        session = saved(tmp_path / "state", model, text(100))
        pools = model.engine.cache.pools
        with safe_open(tmp_path / "state", "np") as file:
            about = file.metadata()
            assert (about["format"], about["version"]) == ("treadle session", "2")
            assert (about["kv"], about["page"]) == ("f16", str(PAGE))
            assert set(file.keys()) == {"ids", "kv_global", "kv_local"}
            assert file.get_tensor("ids").tolist() == session.ids
            assert file.get_tensor("kv_global").shape == (4, pools[0].cell_bytes)
            # the window of 16 tokens begins in the page before the last
            assert file.get_tensor("kv_local").shape == (2, pools[1].cell_bytes)
        assert list(tmp_path.iterdir()) == [tmp_path / "state"]


def test_going_on_from_a_file(tiny: WriteTiny, tmp_path: Path) -> None:
    """In generate and chat; the pages of the model's own session give way."""
    greedy = treadle.Sampling(temperature=0)
    with treadle.load(tiny(), threads=1, context=128) as model:
        prompt = text(60)
        whole = model.generate(prompt, max_tokens=20, sampling=greedy)
        whole.finish()
        session = model.session()
        half = model.generate(prompt, max_tokens=10, sampling=greedy, session=session)
        half.finish()
        session.save(tmp_path / "state.json")  # whatever its name
        session.close()
        model.generate(text(100, seed=9), max_tokens=1).finish()
        session = model.load_session(tmp_path / "state.json")
        made = model.generate(
            session.ids + half.ids[-1:], max_tokens=10, sampling=greedy, session=session
        )
        made.finish()
        assert made.timings.n_cached == 69
        assert half.ids + made.ids == whole.ids


def test_what_does_not_fit(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with treadle.load(tiny(), threads=1, context=128) as model:
        session = saved(path, model, text(100))
        with pytest.raises(ContextFullError, match="no free page"):
            model.load_session(path)
        assert session.n_past == 100
        check_pages(model.engine.cache, [session.seq])
    with treadle.load(tiny(), threads=1, context=99) as model:
        with pytest.raises(ContextFullError, match="100 tokens do not fit the context of 99"):
            model.load_session(path)
        check_pages(model.engine.cache, [])


@pytest.mark.parametrize(
    "other", [{"n_layer": 2}, {"arch": "qwen2"}, {"fmt": "Q8_0"}, {"n_ff": 128}, WINDOWED]
)
def test_a_file_of_another_model(other: dict[str, Any], tiny: WriteTiny, tmp_path: Path) -> None:
    with treadle.load(tiny(**other), threads=1) as model:
        saved(tmp_path / "state", model, text(10))
    with (
        treadle.load(tiny(), threads=1) as model,
        pytest.raises(FileError, match=r"state at byte 8: __metadata__\.model: .*another model"),
    ):
        model.load_session(tmp_path / "state")


def test_a_model_of_the_same_shape_with_other_weights(tiny: WriteTiny, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny().read_bytes())
    with treadle.load(tiny(), threads=1) as model:
        saved(tmp_path / "state", model, text(10))
    with treadle.load(copy, threads=1) as model:
        model.load_session(tmp_path / "state")  # the same bytes at another place
        at = model.gguf.tensors["blk.1.ffn_up.weight"].offset
    with copy.open("r+b") as file:
        file.seek(at)
        file.write(b"\1\2\3")
    with (
        treadle.load(copy, threads=1) as model,
        pytest.raises(FileError, match="another model"),
    ):
        model.load_session(tmp_path / "state")


@pytest.fixture(scope="module")
def state(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("state") / "state"
    with treadle.load(tiny(**WINDOWED), threads=1, context=128) as model:
        saved(path, model, text(50))
    return path.read_bytes()


@pytest.fixture(scope="module")
def reader(tiny: WriteTiny) -> Any:
    with treadle.load(tiny(**WINDOWED), threads=1, context=128) as model:
        yield model


def header_of(state: bytes) -> dict[str, Any]:
    n = int.from_bytes(state[:8], "little")
    header: dict[str, Any] = json.loads(state[8 : 8 + n])
    return header


def with_header(state: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    header = header_of(state)
    change(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + state[8 + int.from_bytes(state[:8], "little") :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["__metadata__"].pop("format"), "not a session file: None"),
        (lambda h: h["__metadata__"].update(format="pt"), "not a session file: 'pt'"),
        (lambda h: h["__metadata__"].update(version="3"), "another format version: '3'"),
        (lambda h: h["__metadata__"].update(page="64"), r"another page size: '64'"),
        (
            lambda h: h["__metadata__"].update(kv="q8_0"),
            r"KV cache format: 'q8_0' \(expected f16\)",
        ),
        (
            lambda h: h["__metadata__"].pop("sha256.kv_local"),
            "kv_local: the checksum does",
        ),
        (lambda h: h["ids"].update(dtype="F32"), r"ids: F32 of shape \[50\]"),
        (lambda h: h["ids"].update(shape=[25, 2]), r"ids: I32 of shape \[25, 2\]"),
        (lambda h: h.update(more=h.pop("kv_local")), "kv_local: is missing"),
        (lambda h: h["kv_global"].update(dtype="I8"), r"kv_global: I8 of shape"),
        (lambda h: h["kv_global"].update(shape=h["kv_global"]["shape"][::-1]), "kv_global: U8 of"),
        (lambda h: h["kv_local"].update(shape=h["kv_local"]["shape"][::-1]), "kv_local: U8 of"),
        (lambda h: h["ids"].update(shape=[2**62]), "ids: data_offsets"),
    ],
)
def test_a_header_that_is_wrong(
    change: Any, message: str, state: bytes, reader: treadle.Model, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    path.write_bytes(with_header(state, change))
    with pytest.raises(FileError, match=message) as caught:
        reader.load_session(path)
    assert caught.value.offset is not None
    check_pages(reader.engine.cache, [])


def test_tokens_that_the_vocabulary_lacks(
    state: bytes, reader: treadle.Model, tmp_path: Path
) -> None:
    import hashlib

    ids = np.array([*text(49), 320], "<i4").tobytes()
    digest = hashlib.sha256(ids).hexdigest()
    made = with_header(state, lambda h: h["__metadata__"].update({"sha256.ids": digest}))
    at = 8 + int.from_bytes(made[:8], "little")
    path = tmp_path / "state"
    path.write_bytes(made[:at] + ids + made[at + len(ids) :])
    with pytest.raises(FileError, match=rf"at byte {at + 49 * 4}: ids: token 320 .*0 to 319"):
        reader.load_session(path)


def test_files_that_are_something_else(reader: treadle.Model, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be opened"):
        reader.load_session(tmp_path / "absent")
    with pytest.raises(FileError, match="is a folder"):
        reader.load_session(tmp_path)
    for name, what in (("", "an empty name"), ("a\0b", "a NUL byte")):
        with pytest.raises(FileError, match=what):
            reader.load_session(name)
        session = reader.session()
        session.feed([5])
        with pytest.raises(FileError, match=what):
            session.save(name)
        session.close()
    (tmp_path / "empty").touch()
    with pytest.raises(FileError, match="an empty file"):
        reader.load_session(tmp_path / "empty")
    with pytest.raises(FileError, match="not a safetensors file: a GGUF file"):
        reader.load_session(reader.path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a regular file"):
        reader.load_session(tmp_path / "pipe")
    check_pages(reader.engine.cache, [])


@settings(deadline=None, max_examples=60)
@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255))))
def test_damage_anywhere(
    state: bytes,
    reader: treadle.Model,
    tmp_path_factory: pytest.TempPathFactory,
    cut: float,
    flips: list[tuple[float, int]],
) -> None:
    damaged = bytearray(state[: int(cut * len(state)) + 1] if cut < 0.7 else state)
    for at, bits in flips:
        damaged[min(int(at * len(damaged)), len(damaged) - 1)] ^= bits
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    n = 8 + int.from_bytes(state[:8], "little")
    if bytes(damaged) == state:
        reader.load_session(path).close()
    elif bytes(damaged[n:]) != state[n:]:
        with pytest.raises(FileError) as caught:
            reader.load_session(path)
        assert caught.value.offset is not None
    else:  # in the header; of what it says of its writer, nothing is believed
        with contextlib.suppress(FileError):
            session = reader.load_session(path)
            assert session.ids == text(50)
            session.close()
    reader.engine.cache.forget()
    check_pages(reader.engine.cache, [])


def test_every_byte_of_keys_and_values_counts(
    state: bytes, reader: treadle.Model, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    path.write_bytes(state)
    with open_file(path) as file:
        offsets = {name: t.offset + t.n_bytes // 2 for name, t in file.tensors.items()}
        begins = {name: t.offset for name, t in file.tensors.items()}
    for name, at in offsets.items():
        damaged = bytearray(state)
        damaged[at] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=f"{name}: the checksum does not match") as caught:
            reader.load_session(path)
        assert caught.value.offset == begins[name]


def test_saving_replaces_whole_files_or_none(
    tiny: WriteTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    with treadle.load(tiny(), threads=1, context=128) as model:
        with pytest.raises(TreadleError, match="no tokens"):
            model.session().save(path)
        session = saved(path, model, text(10))
        before = path.read_bytes()
        session.feed(text(30, seed=4))

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(FileError, match="the disk is full"):
                session.save(path)
        assert path.read_bytes() == before
        session.save(path)
        assert model.load_session(path).n_past == 40
        for wrong, message in (
            (tmp_path, "is a folder"),
            (tmp_path / "none" / "x", "its folder does not exist"),
            (model.path, "is also the input"),
        ):
            with pytest.raises(FileError, match=message):
                session.save(wrong)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TreadleError, match="the model is closed"):
        session.save(path)


def test_a_file_that_shrinks_meanwhile(state: bytes, tmp_path: Path) -> None:
    """An error, and no signal: keys and values are read, not mapped."""
    path = tmp_path / "state"
    path.write_bytes(state)
    with open_file(path) as file:
        tensor = file.tensors["kv_global"]
        os.truncate(path, tensor.offset + 10)
        with pytest.raises(FileError, match=f"at byte {tensor.offset}: kv_global: cut short"):
            list(session_file._read(tensor, tensor.shape[1], {}))
