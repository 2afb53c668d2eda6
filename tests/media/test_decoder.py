"""The decoder's side of pictures and sound, with the truth's rows: no tower runs here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.matrix_rounding import limit, sharp_isa
from tests.media.decoder_cases import CASES, DecoderCase, Prompt, error, load, prompt_of
from treadle.engine.batch import BatchItem
from treadle.errors import TreadleError
from treadle.kernels.run_state import PAGE
from treadle.kvcache.media import MediaEntry

PREFIXED = [(case, prefix) for case in CASES for prefix in ("", *(("two.",) if case.two else ()))]
BY_NAME = {case.name: case for case in CASES}
PAGED = [case for case in CASES if case.name not in ("qwen35", "lfm2vl")]  # without states


@pytest.fixture(scope="session")
def media(data: Path) -> Path:
    return data / "media"


def whole(model: treadle.Model, prompt: Prompt) -> np.ndarray:
    with model.session() as session:
        return session.logits(prompt.ids)


@pytest.mark.parametrize(("case", "prefix"), PREFIXED, ids=[f"{c}{p}" for c, p in PREFIXED])
def test_logits_equal_the_truth(case: DecoderCase, prefix: str, media: Path) -> None:
    for isa in {sharp_isa(), None}:
        with load(media, case, isa=isa) as model:
            prompt = prompt_of(model, media, case, prefix)
            allowed = limit(case.tolerance, "F16", model.isa)
            assert error(whole(model, prompt), prompt.logits) < allowed, isa


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_rows_give_other_logits(case: DecoderCase, media: Path) -> None:
    """The comparison above can fail: rows in the opposite order are far off."""
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        for entry in prompt.entries:
            assert entry.rows is not None
            entry.rows = np.ascontiguousarray(entry.rows[::-1])
        assert error(whole(model, prompt), prompt.logits) > 100 * case.tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_at_every_token(case: DecoderCase, media: Path) -> None:
    """A prompt in two runs, cut anywhere but inside a bidirectional span, and then token by token
    after its media, gives the same logits.
    """
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        for at in range(1, len(prompt.ids)):
            if model.engine.media.run_length(prompt.ids[:at]) != at:
                continue  # a run cannot end here
            with model.session() as session:
                first = session.logits(prompt.ids[:at])
                # Without what the cache has: all of it is computed again.
                rest = session.logits(prompt.ids[at:])
            found = np.concatenate([first, rest])
            assert error(found, prompt.logits) < case.tolerance, at


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_runs(case: DecoderCase, media: Path) -> None:
    """A model whose runs hold few tokens cuts the prompt where it may, and no span."""
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        chunks = [list(ids) for ids in model.engine.cache.chunks(prompt.ids, 5)]
        assert [id for chunk in chunks for id in chunk] == prompt.ids
        with model.session() as session:
            found = np.concatenate([session.logits(ids) for ids in chunks])
        assert error(found, prompt.logits) < case.tolerance


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_span_of_few_tokens(name: str, media: Path) -> None:
    """A picture of three rows, in a run of its own, is a part of few tokens: its rows see each
    other there too, as in one run with all.
    """
    case = BY_NAME[name]
    with load(media, case) as model:
        rows = prompt_of(model, media, case).entries[0].rows
        assert rows is not None
        text = [40 + i for i in range(20)]
        found = {}
        for spans in (((0, 3),), ()):
            digest = f"few {spans}".encode().ljust(32)
            entry = model.engine.media.enter(MediaEntry(digest, 3, spans=spans))
            entry.rows = rows[:3]
            ids = [*text, *entry.ids, 70, 71]
            with model.session() as session:
                whole = session.logits(ids)
            model.engine.cache.forget()
            with model.session() as session:
                parts = [session.logits(part) for part in (text, list(entry.ids), [70, 71])]
            assert error(np.concatenate(parts), whole) < case.tolerance
            found[spans] = whole
        causal, seen = found[()], found[((0, 3),)]
        assert error(causal[20:22], seen[20:22]) > 100 * case.tolerance


@pytest.mark.parametrize("name", ["qwen2vl", "qwen25vl", "qwen3vl", "glm4v"])
def test_a_picture_at_the_very_beginning(name: str, media: Path) -> None:
    """Positions count from 0; the text behind stands at the picture's longer side, so nearer than
    its index. Rotations are relative: from another first position on, the logits are the same.
    """
    case = BY_NAME[name]
    with load(media, case) as model:
        entry = prompt_of(model, media, case).entries[0]
        n, text = entry.n_rows, [65, 66, 67, 68]
        ids = [*entry.ids, *text]
        shifts: list[tuple[int, int]] = []
        model.engine.media.add_shifts(shifts, ids, 0)
        assert shifts == [(n, entry.advance - n)]
        assert entry.advance < n
        positions = model.engine.media.positions(shifts, ids, 0)
        assert positions[:, 0].tolist() == [0, 0, 0]
        assert positions[:, n:].tolist() == [list(range(entry.advance, entry.advance + 4))] * 3
        with model.session() as session:
            whole = session.logits(ids)
        for at in (n, n + 1, n + 3):
            model.engine.cache.forget()
            with model.session() as session:
                cut = np.concatenate([session.logits(ids[:at]), session.logits(ids[at:])])
            assert error(cut, whole) < case.tolerance
        assert entry.positions is not None
        moved = MediaEntry(b"moved".ljust(32), n, entry.positions + 7, entry.advance + 7)
        moved = model.engine.media.enter(moved)
        moved.rows = entry.rows
        with model.session() as session:
            assert error(session.logits([*moved.ids, *text]), whole) < case.tolerance
        wrong = MediaEntry(b"wrong".ljust(32), n, entry.positions, n)
        wrong = model.engine.media.enter(wrong)
        wrong.rows = entry.rows
        with model.session() as session:
            assert error(session.logits([*wrong.ids, *text]), whole) > 100 * case.tolerance


def test_a_batch_of_texts_with_and_without_pictures(media: Path) -> None:
    """Texts without pictures have the same bits beside one with a picture as without it."""
    for name in ("gemma3", "qwen3vl", "llava"):
        case = BY_NAME[name]
        with load(media, case, deterministic=True) as model:
            prompt = prompt_of(model, media, case)
            engine = model.engine
            text = [40 + i for i in range(20)]
            alone = model.logits(text)
            model.engine.cache.forget()
            with model.session() as one, model.session() as other:
                items = [BatchItem(one.seq, prompt.ids, 1), BatchItem(other.seq, text, len(text))]
                together = engine.run(items)
            assert (together[1:] == alone).all()
            assert error(together[0], prompt.logits[-1]) < case.tolerance


def test_texts_run_the_plans_that_they_ran_before(media: Path) -> None:
    """A batch without pictures has no step for them, whatever ran before."""
    case = BY_NAME["qwen3vl"]
    with load(media, case) as model:
        text = [40 + i for i in range(20)]
        before = [step.label for step in model.engine.plan(20, 1)]
        expected = model.logits(text)
        whole(model, prompt_of(model, media, case))
        assert [step.label for step in model.engine.plan(20, 1)] == before
        assert not any("media" in label for label in before)
        model.engine.cache.forget()
        assert (model.logits(text) == expected).all()


def test_the_cache_knows_pictures(media: Path) -> None:
    """A prompt with the same picture is found in the cache; one with another picture is not."""
    for name in ("gemma3", "pixtral", "qwen3asr"):
        case = BY_NAME[name]
        with load(media, case) as model:
            prompt = prompt_of(model, media, case)
            more = prompt.ids + [65] * 20
            with model.session() as session:
                session.feed(more)
            with model.session() as session:
                n = session.match([*more, 66])
                assert n == len(more) // PAGE * PAGE > 0
                last = session.feed([*more, 66][n:])
            model.engine.cache.forget()
            with model.session() as session:
                assert error(last, session.feed([*more, 66])) < case.tolerance
            (entry,) = prompt.entries[:1]
            other = model.engine.media.enter(
                MediaEntry(b"other".ljust(32), entry.n_rows, spans=entry.spans)
            )
            other.rows = entry.rows
            first = prompt.ids.index(entry.ids[0])
            swapped = list(more)
            swapped[first : first + entry.n_rows] = other.ids
            with model.session() as session:
                assert session.match(swapped) <= first


@pytest.mark.parametrize("case", CASES, ids=str)
def test_truncate_goes_back_to_the_beginning_of_a_picture(case: DecoderCase, media: Path) -> None:
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        entry = prompt.entries[0]
        first = prompt.ids.index(entry.ids[0])
        for n in (first, first + 1, first + entry.n_rows - 1, first + entry.n_rows):
            with model.session() as session:
                session.feed(prompt.ids)
                session.truncate(n)
                kept = session.n_past
                assert kept <= (n if n in (first, first + entry.n_rows) else first)
                found = session.logits(prompt.ids[kept:])
            assert error(found, prompt.logits[kept:]) < case.tolerance, n


def test_a_fork_continues_after_a_picture(media: Path) -> None:
    case = BY_NAME["qwen25vl"]
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        cut = len(prompt.ids) - 2
        with model.session() as session:
            session.feed(prompt.ids[:cut])
            fork = model.engine.cache.fork(session.seq)
            rows = model.engine.run([BatchItem(fork, prompt.ids[cut:], 2)])
            fork.close()
        assert error(rows, prompt.logits[cut:]) < case.tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_sessions(case: DecoderCase, media: Path, tmp_path: Path) -> None:
    """A session with a picture is saved and loaded, also by a process that never saw it."""
    path = tmp_path / "session"
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        cut = len(prompt.ids) - 2
        with model.session() as session:
            session.feed(prompt.ids[:cut])
            session.save(path)
    with load(media, case) as model, model.load_session(path) as session:
        assert session.n_past == cut
        again = prompt_of(model, media, case)  # rows that the file cuts are given anew
        found = session.logits(prompt.ids[cut:])
        assert error(found, prompt.logits[cut:]) < case.tolerance
        assert session.match([*again.ids, 66]) == len(again.ids)  # the same picture has its ids


def test_a_list_of_pictures_that_contradicts_the_registry(media: Path) -> None:
    """The digest of a known picture, with more rows than it has."""
    case = BY_NAME["qwen25vl"]
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        registry = model.engine.media
        text = registry.describe(prompt.ids)
        assert registry.restore(text, prompt.ids) == prompt.ids
        (entry,) = prompt.entries
        given = json.loads(text)
        given[0] |= {"rows": entry.n_rows + 1, "positions": None, "spans": []}
        ids = [*prompt.ids, entry.ids[-1] + 1]
        with pytest.raises(ValueError, match=f"the file says {entry.n_rows + 1} rows"):
            registry.restore(json.dumps(given), ids)
        given[0] |= {"rows": entry.n_rows, "spans": [[0, 1, 2]]}
        with pytest.raises(ValueError, match="too many values"):
            registry.restore(json.dumps(given), prompt.ids)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_page_files(case: DecoderCase, media: Path, tmp_path: Path) -> None:
    """Pages with a picture are found by another process, which gives it another number."""
    with load(media, case, cache_dir=tmp_path) as model:
        prompt = prompt_of(model, media, case)
        with model.session() as session:
            session.feed(prompt.ids + [65] * PAGE)
    with load(media, case, cache_dir=tmp_path) as model:
        model.engine.media.enter(MediaEntry(b"first".ljust(32), 3))
        again = prompt_of(model, media, case)
        assert again.ids != prompt.ids
        for entry in again.entries:
            entry.rows = None  # not needed: their pages are there
        ids = again.ids + [65] * PAGE
        with model.session() as session:
            n = session.match([*ids, 66])
            assert n == len(ids) // PAGE * PAGE
            found = session.feed([*ids, 66][n:])
    with load(media, case) as model:
        fresh = prompt_of(model, media, case)
        with model.session() as session:
            expected = session.feed([*fresh.ids, *[65] * PAGE, 66])
    assert error(found, expected) < case.tolerance


def test_rows_that_are_missing_or_too_wide(media: Path) -> None:
    case = BY_NAME["llava"]
    with load(media, case) as model:
        prompt = prompt_of(model, media, case)
        (entry,) = prompt.entries
        rows = entry.rows
        assert rows is not None
        entry.rows = None
        with model.session() as session:
            with pytest.raises(TreadleError, match="not encoded"):
                session.feed(prompt.ids)
            entry.rows = rows[:, :-1]
            with pytest.raises(TreadleError, match=r"rows of shape .* expected"):
                session.feed(prompt.ids)
            assert session.n_past == 0
            unknown = model.engine.media.first_id + (99 << 16)
            with pytest.raises(TreadleError, match="a token id outside"):
                session.feed([65, unknown])
            with pytest.raises(TreadleError, match="a token id outside"):
                session.feed([65, entry.ids[-1] + 1])
