"""A second model's drafts: they change how long a text takes, and nothing of the text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.kvcache.test_cache import check_pages
from tests.scheduler.fake_engine import N_VOCAB, FakeEngine
from tests.spec_decode.test_ngram import World, alone
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.run_state import PAGE
from treadle.spec_decode.draft_model import MIN_CHUNK, Drafter, check_vocabularies
from treadle.spec_decode.ngram import DraftController


def novel(ids: Sequence[int]) -> int:
    """A text that hardly repeats three ids; its end says how it goes on."""
    return (sum(a * b for a, b in zip(ids[-4:], (31, 17, 5, 101), strict=False)) + 7) % 250


class FakeDraft(FakeEngine):
    """A second engine: what it takes passes on the first one's clock."""

    def __init__(self, next_id: Any, world: World, step_s: float, **given: Any) -> None:
        super().__init__(next_id, **given)
        self.world = world
        self.step_s = step_s

    def sample(self, parts: Sequence[BatchItem], *_: Any) -> Any:
        rows = self.run(parts)
        return [SimpleNamespace(top=SimpleNamespace(first=(0.0, int(row[0])))) for row in rows]

    def run(self, parts: Sequence[BatchItem]) -> np.ndarray:
        rows = super().run(parts)
        self.world.engine.now += self.step_s * (1 + sum(len(part.ids) for part in parts) / 32)
        return rows


def with_draft(next_id: Any, step_s: float = 0.002, n_ctx: int = 40 * PAGE, **given: Any) -> World:
    """A world whose second model says ``next_id``."""
    world = World(novel, **given)
    sizes = {name: given[name] for name in ("window", "n_sequences") if name in given}
    engine: Any = FakeDraft(next_id, world, step_s, n_ctx=n_ctx, **sizes)
    world.scheduler.drafting.drafter = Drafter(engine, N_VOCAB, world.engine.clock)
    return world


def check_draft_pages(world: World) -> None:
    """Its pages are counted right, and no page that a text may find has an id that was a guess."""
    drafter = world.scheduler.drafting.drafter
    assert drafter is not None
    cache: Any = drafter.engine.cache
    check_pages(cache, [text.seq for text in drafter._texts.values()])


def sometimes(ids: Sequence[int]) -> int:
    return novel(ids) if ids[-1] % 5 else 3


@settings(max_examples=25)
@given(data=st.data(), window=st.sampled_from([0, 40]), n_ctx=st.sampled_from([6, 40]))
def test_texts_are_those_without_drafts(data: st.DataObject, window: int, n_ctx: int) -> None:
    """Several texts that come and are cancelled in the middle, longer than the second's context."""
    world = with_draft(
        sometimes, window=window, n_ctx=n_ctx * PAGE, n_sequences=2, cost=lambda p, n, c: 0.03
    )
    asked = []
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = [i * 7 % 50 for i in range(data.draw(st.integers(1, 90)))]
        n = data.draw(st.integers(1, 200))
        asked.append((world.add(prompt, n, speculate=data.draw(st.booleans())), prompt))
        for _ in range(data.draw(st.integers(0, 30))):
            world.scheduler.step()
            check_draft_pages(world)
    if data.draw(st.booleans()):
        world.scheduler.cancel(data.draw(st.sampled_from(asked))[0])
    world.run()
    check_draft_pages(world)
    for request, prompt in asked:
        assert request.answer.error is None
        assert request.ids == alone(world, prompt, len(request.answer.ids))
    drafter = world.scheduler.drafting.drafter
    assert drafter is not None
    drafter.keep_only(())
    check_draft_pages(world)


@pytest.mark.parametrize("n", [1, 3])
def test_a_good_draft_model_pays(n: int) -> None:
    times = []
    for draft in (False, True):
        world = with_draft(novel, n_sequences=4)
        if not draft:
            world.scheduler.drafting.drafter = None
        asked = [world.add([i], 400) for i in range(n)]
        world.run()
        times.append(world.engine.now)
    assert times[0] > 1.6 * times[1]
    assert all(request.answer.timings.n_accepted > 200 for request in asked)


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.0001, 0.002, 0.05])
@pytest.mark.parametrize("next_id", [lambda ids: 3, novel])
def test_what_it_may_cost(step_s: float, next_id: Any) -> None:
    """One that is always wrong, and one that is right and as slow as the model itself."""
    times = []
    for draft in (False, True):
        world = with_draft(next_id, step_s, cost=lambda prefill, n, context: 0.02 + 0.02 * n)
        if not draft:
            world.scheduler.drafting.drafter = None
        for text in range(4):
            request = world.add([text], 300)
            world.run()
        times.append(world.engine.now)
        assert bool(request.answer.timings.n_drafted) <= draft
    assert times[1] <= 1.03 * times[0]


def test_a_long_prompt_is_read_from_nearer_its_end() -> None:
    """Where reading all of it would take longer than drafts may cost."""
    world = with_draft(novel, step_s=0.01)
    request = world.add(list(range(1000)), 300)
    world.run()
    assert request.answer.timings.n_accepted
    drafter = world.scheduler.drafting.drafter
    assert drafter is not None
    engine: Any = drafter.engine
    assert engine.runs
    assert MIN_CHUNK <= sum(len(ids) for run in engine.runs for ids, _ in run) < 1000
    assert all(at + len(ids) < 1000 for run in engine.runs for ids, at in run)


def test_where_the_text_repeats_itself_the_second_model_is_not_asked() -> None:
    def again(ids: Sequence[int]) -> int:
        return ids[-9] if len(ids) > 12 else len(ids)

    world = World(again)
    engine: Any = FakeDraft(again, world, 0.002, n_ctx=40 * PAGE)
    world.scheduler.drafting.drafter = Drafter(engine, N_VOCAB, world.engine.clock)
    request = world.add(list(range(9)), 300)
    world.run()
    assert request.answer.timings.n_accepted > 200
    assert len(engine.runs) < 20  # at most while nothing was known of the lookup


def test_a_second_model_that_fails_is_left_out() -> None:
    world = with_draft(novel)
    drafter = world.scheduler.drafting.drafter
    assert drafter is not None

    def fail(*_: Any) -> Any:
        raise FileError("has shrunk", path="small.gguf")

    drafter.engine.sample = fail  # type: ignore[assignment,method-assign]
    request = world.add([1], 100)
    with pytest.warns(UserWarning, match="drafting stopped: small.gguf"):
        world.run()
    assert request.ids == alone(world, [1], 100)


# -- models ---------------------------------------------------------------------------------------


class Always(DraftController):
    """Drafts whatever they cost: the clock decides nothing."""

    loss_left_s = 1e9

    def allows(self, *_: Any) -> bool:
        return True

    def choose(self, n: int, guesses: Any, most: int) -> int:
        return len(guesses)

    def gain(self, n: int, n_drafted: int, right: float, cost: float = 0.0) -> float:
        return right


GEMMA = {"arch": "gemma3", "window": 16, "n_layer": 6, "tied": 0}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, GEMMA])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.3, "seed": 5}])
def test_a_model_writes_the_same_text(
    sizes: dict[str, Any], how: dict[str, Any], tiny: WriteTiny
) -> None:
    """With itself for a draft, and with another one."""
    own = tiny(**sizes)
    made = []
    for draft in (None, own, tiny(n_layer=1, tied=0)):
        with treadle.load(
            own, threads=1, context=256, n_sequences=2, deterministic=True, draft=draft
        ) as model:
            model.stepper.scheduler.drafting.controller = Always()
            texts = [
                model.generate(ids, max_tokens=90, ignore_eos=True, **how)
                for ids in ([5, 6, 7, 9], list(range(40)))
            ]
            for text in texts:
                text.begin(look_ahead=float("inf"))
            made.append([(text.finish(), text.ids) for text in texts])
            right = [text.timings.n_accepted for text in texts]
            if draft == own and how["temperature"] == 0:
                assert min(right) > 30
    assert made[0] == made[1] == made[2]


def with_tokens(to: Path, tokens: list[str], n_unused: int = 0) -> Path:
    """A file with a vocabulary and nothing else; the last tokens are unused."""
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - n_unused) + [5] * n_unused)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return to


def test_another_vocabulary_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    """Files of one family are padded differently: that is no difference."""
    tokens = ["a", "b", "c", "<|endoftext|>"]
    made = {
        "model": with_tokens(tmp_path / "model.gguf", tokens),
        "other": with_tokens(tmp_path / "other.gguf", ["a", "x", "y", "<|endoftext|>"]),
        "longer": with_tokens(tmp_path / "longer.gguf", [*tokens, "d"]),
        "padded": with_tokens(tmp_path / "padded.gguf", [*tokens, "[PAD4]", "[PAD5]"], 2),
    }
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_gguf(path)) for name, path in made.items()}
        with pytest.raises(UnsupportedError, match=r"other.gguf: .* token 1 is 'x', expected 'b'"):
            check_vocabularies(files["model"], files["other"])
        for pair in (("model", "longer"), ("longer", "model")):
            with pytest.raises(
                UnsupportedError, match=r". and . tokens\): only .*longer.* has token 4, 'd'"
            ):
                check_vocabularies(*(files[name] for name in pair))
        for pair in (("model", "padded"), ("padded", "model"), ("model", "model")):
            check_vocabularies(*(files[name] for name in pair))


@pytest.mark.parametrize(
    ("name", "draft"), [("qwen3moe", "olmoe"), ("qwen3moe", None), (None, "qwen3moe")]
)
def test_files_without_a_vocabulary(
    name: str | None, draft: str | None, tiny: WriteTiny, data: Path
) -> None:
    """Two take ids from each other; beside a file that has one, the file that lacks it is named."""
    own, other = (data / "arch" / f"{at}.gguf" if at else tiny() for at in (name, draft))
    if name and draft:
        with treadle.load(own, threads=1, context=128, draft=other, deterministic=True) as model:
            model.stepper.scheduler.drafting.controller = Always()
            made = model.generate([5, 6, 7], max_tokens=40, temperature=0)
            made.finish()
            assert made.timings.n_drafted
        with treadle.load(own, threads=1, context=128, deterministic=True) as model:
            alone = model.generate([5, 6, 7], max_tokens=40, temperature=0)
            alone.finish()
            assert alone.ids == made.ids
    else:
        says = r"drafts for .* need its vocabulary, but .*qwen3moe.gguf has none"
        with pytest.raises(UnsupportedError, match=says):
            treadle.load(own, threads=1, context=128, draft=other)


def test_layers_with_a_state_are_refused(tiny: WriteTiny) -> None:
    """Of a second model: it would read a text again for each draft."""
    with pytest.raises(UnsupportedError, match="lfm2 keep a recurrent state"):
        treadle.load(tiny(), threads=1, context=128, draft=tiny("lfm2"))


@pytest.mark.parametrize("off", [False, 0])
def test_a_second_model_that_is_to_draft_nothing(off: Any, tiny: WriteTiny) -> None:
    with pytest.raises(TreadleError, match="draft= cannot be combined with speculate=False"):
        treadle.load(tiny(), draft=tiny(), speculate=off)


def test_closing_while_it_writes(tiny: WriteTiny) -> None:
    """Another thread's step ends first; then its text ends with the reason."""
    model = treadle.load(tiny(), draft=tiny(), threads=1, context=256)
    model.stepper.scheduler.drafting.controller = Always()
    drafter = model.stepper.scheduler.drafting.drafter
    assert drafter is not None
    usual, closer = drafter.draft_ids, threading.Thread(target=model.close)

    def write(wanted: Any) -> Any:
        if wanted and not closer.is_alive():
            closer.start()
            closer.join(0.2)
            assert closer.is_alive()
        return usual(wanted)

    drafter.draft_ids = write  # type: ignore[method-assign]
    with pytest.raises(TreadleError, match="the model is closed"):
        model.generate([5, 6, 7] * 9, max_tokens=200, temperature=0, ignore_eos=True).finish()
    closer.join()
