"""Text of encoder-decoder models: prompts that an encoder reads, and requests that share them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import treadle
from tests.models.hf_tiny import N_VOCAB
from tests.tiny_t5 import END, write_t5
from treadle.api.engine_plans import compile_plans
from treadle.api.model import Model
from treadle.cli.app import app
from treadle.errors import ContextFullError, NoRoomError, TreadleError, UnsupportedError
from treadle.kernels.run_state import PAGE
from treadle.kvcache.encoded_inputs import EncodedInputs

RNG = np.random.default_rng(3)
SOURCES = [[int(i) for i in RNG.integers(3, N_VOCAB, n)] for n in (5, 40, 17, 33, 3, 90)]
N_TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5") / "t5.gguf", "flan")


def opened(path: Path, **settings: Any) -> Model:
    return treadle.load(path, **{"threads": 2, "kv": "f32", "context": 128, **settings})


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with opened(path, n_sequences=3) as model:
        yield model


@pytest.fixture(scope="module")
def greedy(model: Model) -> list[list[int]]:
    """The best ids behind each source, by the logits of the whole text, again for each token."""
    found = []
    for source in SOURCES:
        ids = [model.config.start_id]
        while len(ids) <= N_TOKENS:
            best = int(model.logits(ids, source=source)[-1].argmax())
            if best == END:
                break
            ids.append(best)
        found.append(ids[1:])
    return found


def n_used(model: Model) -> int:
    """Pages of encoded prompts that a sequence, or the list of prompts, has."""
    return sum(pool.n_pages - len(pool.free) for pool in model.engine.cache.cross)


def is_idle(model: Model) -> bool:
    """Whether all that is held are prompts that nobody uses."""
    cache = model.engine.cache
    cache.forget()
    return not n_used(model) and all(pool.n_available == pool.n_pages for pool in cache.pools)


def test_one_by_one_and_together(model: Model, greedy: list[list[int]]) -> None:
    for source, expected in zip(SOURCES, greedy, strict=True):
        made = model.generate(source, max_tokens=N_TOKENS, temperature=0)
        made.finish()
        assert made.ids == expected
        assert made.timings.n_prompt == len(source)
    each = model.generate_many(SOURCES * 2, max_tokens=N_TOKENS, temperature=0)
    assert [made.ids for made in each] == greedy * 2
    assert is_idle(model)


def test_text(model: Model) -> None:
    """A prompt is text with an end behind it; the answer's first space is the tokenizer's own."""
    text = "the cat sat"
    ids = model.tokenize(text)
    assert ids[-1] == END
    made = model.generate(text, max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    pieces = list(made)
    assert "".join(pieces) == model.detokenize(made.ids)
    assert made.logprobs is not None
    assert len(made.logprobs) == 8
    row = model.logits([0], source=text)[-1]
    best = row.max() - np.log(np.exp(row - row.max()).sum()) - row.max()
    assert abs(made.logprobs[0].logprob - best) < 1e-4
    stop = model.detokenize(made.ids[2:3]).strip()
    if stop and len("".join(pieces).split(stop)) > 1:
        cut = model.generate(text, max_tokens=8, temperature=0, stop=stop, ignore_eos=True)
        assert cut.finish() == "".join(pieces).split(stop)[0]
    assert model.generate("", max_tokens=2, temperature=0).finish() is not None


def test_equal_prompts_are_read_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.engine.cache.forget()
    encoder = model.engine.encoder
    assert encoder is not None
    encoded: list[list[int]] = []
    begin = encoder.encode

    def encode(prompts: Any) -> Iterator[None]:
        encoded.append([len(ids) for ids, _ in prompts])
        return begin(prompts)

    monkeypatch.setattr(encoder, "encode", encode)
    first = model.generate(SOURCES[1], max_tokens=4, temperature=0)
    first.finish()
    again = list(model.generate_many([SOURCES[1]] * 3, max_tokens=4, temperature=0))
    assert [made.ids for made in again] == [first.ids] * 3
    assert [made.timings.n_cached for made in again] == [40] * 3
    assert encoded == [[40]]
    anew = model.generate(SOURCES[1], max_tokens=4, temperature=0, cache_prompt=False)
    anew.finish()
    assert anew.ids == first.ids
    assert anew.timings.n_cached == 0
    assert encoded == [[40], [40]]
    short = [SOURCES[0], SOURCES[2], SOURCES[4]]
    assert len(list(model.generate_many(short, max_tokens=2))) == 3
    assert encoded[2:] in ([[5, 17, 3]], [[5], [17, 3]], [[5, 17], [3]])  # as they were admitted


def test_deterministic_bits(path: Path) -> None:
    """Whatever prompts are encoded together."""
    settings: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
    with opened(path, n_sequences=6, deterministic=True) as model:
        alone = [model.generate(source, **settings) for source in SOURCES]
        for made in alone:
            made.finish()
        model.engine.cache.forget()
        together = list(model.generate_many(SOURCES, **settings))
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert [t.logprob for t in one.logprobs or ()] == [t.logprob for t in other.logprobs or ()]


def test_prompts_that_begin_alike_share_no_pages(path: Path) -> None:
    """The decoder's tokens are the same for both, and their keys and values are not."""
    ids = [0, *range(10, 60)]
    with opened(path, n_sequences=2) as model:
        expected = [model.logits(ids, source=source) for source in SOURCES[:2]]
        assert not np.allclose(expected[0], expected[1], atol=0.1)
        for source, rows in zip(SOURCES[:2], expected, strict=True):
            with model.session(source=source) as session:
                assert session.match(ids) == 0
                assert np.abs(session.prefill(ids) - rows[-1]).max() < 1e-4
                assert session.match(ids) == len(ids) - 1  # its own
            session = model.session(source=source)
            session.feed(ids)
            session.retire()
        assert not model.engine.cache.tree.find(ids, len(ids) - 1, ())
        assert is_idle(model)


def test_less_room_than_requests(path: Path, greedy: list[list[int]]) -> None:
    """Prompts that nobody uses give way; requests wait, or give up their pages and begin again."""
    with opened(path, n_sequences=1) as model:
        each = model.generate_many(SOURCES, max_tokens=N_TOKENS, temperature=0)
        assert [made.ids for made in each] == greedy
        held = [model.session(source=SOURCES[0]), model.session(source=SOURCES[5])]
        with pytest.raises(NoRoomError, match="pages for an encoder's"):
            model.session(source=SOURCES[1])
        for session in held:
            session.close()
        assert is_idle(model)


def test_requests_are_preempted(path: Path) -> None:
    """One with a higher priority takes the pages of a prompt; the other reads its prompt again."""
    with opened(path, n_sequences=1) as model:
        long = [*SOURCES[5], *SOURCES[3][:30]]
        alone = model.generate(long, max_tokens=20, temperature=0).finish()
        urgent = model.generate(SOURCES[1], max_tokens=4, temperature=0).finish()
        first = model.build_request(long, max_tokens=20, temperature=0, priority=5)
        second = model.build_request(SOURCES[1], max_tokens=4, temperature=0)
        scheduler = model.stepper.scheduler
        scheduler.add(first)
        while len(first.answer.ids) < 3:
            scheduler.step()
        scheduler.add(second)
        while not (first.answer.done and second.answer.done):
            scheduler.step()
        assert scheduler.queue.n_preempted == 1
        for request, text in ((first, alone), (second, urgent)):
            assert "".join(piece for piece, _ in request.answer.pieces) == text
        assert is_idle(model)


def test_cancelled_while_its_prompt_is_read(
    model: Model, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on; the encoder begins with the next prompt."""
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 0.0)
    model.engine.cache.forget()
    scheduler = model.stepper.scheduler
    settings: dict[str, Any] = {"max_tokens": N_TOKENS, "temperature": 0}
    running = model.build_request(SOURCES[0], **settings)
    scheduler.add(running)
    while not running.answer.ids:
        scheduler.step()
    n_begun = len(running.answer.ids)
    request, other = (
        model.build_request(source, **settings) for source in (SOURCES[5], SOURCES[2])
    )
    scheduler.add(request)
    scheduler.add(other)
    for _ in range(4):
        scheduler.step()
    assert len(running.answer.ids) == n_begun + 4  # a token in each of the steps
    assert not request.answer.ids
    assert not other.answer.ids
    scheduler.cancel(request)
    while not (running.answer.done and other.answer.done):
        scheduler.step()
    assert [running.answer.ids, other.answer.ids] == [greedy[0], greedy[2]]
    assert not request.answer.ids
    assert is_idle(model)


def test_a_session_is_begun_between_two_slices(
    model: Model, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt takes the encoder; the request's is read again from its beginning."""
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 0.0)
    model.engine.cache.forget()
    scheduler = model.stepper.scheduler
    request = model.build_request(SOURCES[5], max_tokens=N_TOKENS, temperature=0)
    scheduler.add(request)
    for _ in range(5):
        scheduler.step()
    with model.session(source=SOURCES[1]) as session:
        assert int(session.feed([0]).argmax()) == greedy[1][0]
    while not request.answer.done:
        scheduler.step()
    assert request.answer.ids == greedy[5]
    assert is_idle(model)


def test_drafts(path: Path, greedy: list[list[int]]) -> None:
    with opened(path, speculate=True) as model:
        made = model.generate(SOURCES[1], max_tokens=N_TOKENS, temperature=0)
        made.finish()
        assert made.ids == greedy[1]


def test_too_long(model: Model) -> None:
    with pytest.raises(ContextFullError, match="129 tokens do not fit the context of 128"):
        model.generate([5] * 129)
    with pytest.raises(ContextFullError):
        model.session(source=[5] * 129)
    made = model.generate([5] * 128, temperature=0, ignore_eos=True)
    made.finish()
    assert made.finish_reason == "context"
    assert len(made.ids) == 127


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lora", ["adapter.gguf"]),
        ("control_vectors", ["vector.gguf"]),
        ("cache_dir", "folder"),
        ("mmproj", "mmproj.gguf"),
    ],
)
def test_settings_that_are_refused(setting: str, value: Any, path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{setting}=: not supported in an encoder-decoder"):
        opened(path, **{setting: value})
    with pytest.raises(UnsupportedError, match="draft=: not supported"):
        opened(path, draft=path)


def test_sessions(model: Model, tmp_path: Path) -> None:
    with model.session(source="the cat") as session:
        session.feed([0, 5, 6])
        with pytest.raises(UnsupportedError, match="cannot be saved"):
            session.save(tmp_path / "saved")
        with pytest.raises(UnsupportedError, match="a session has a prompt of its own"):
            model.generate("the cat", session=session)
    with pytest.raises(UnsupportedError, match="has no files of sessions"):
        model.load_session(tmp_path / "saved")
    assert is_idle(model)


def test_a_decoder_alone_has_no_source(data: Path) -> None:
    with (
        treadle.load(data / "models" / "stories260K.gguf", threads=1) as model,
        pytest.raises(UnsupportedError, match="source: llama has no encoder"),
    ):
        model.session(source="Once")


def test_a_chat_is_its_last_question(model: Model) -> None:
    """Behind the system message, and no turns: the model knows none."""
    messages = [
        {"role": "system", "content": "<2de>"},
        {"role": "user", "content": "on the mat"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": " the cat "},
    ]
    assert model.chat_prompt(messages) == "<2de> the cat"
    made = model.chat(messages, max_tokens=4, temperature=0)
    assert made.finish() == model.generate("<2de> the cat", max_tokens=4, temperature=0).finish()


# -- the command line ------------------------------------------------------------------------------


def ran(*args: Any, **more: Any) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], **more)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands(path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    text = model.generate("the cat", max_tokens=6, temperature=0).finish()
    assert text in ran("run", path, "the cat", "-n", 6, "--temp", 0, "--kv", "f32")
    assert text in ran("chat", path, "-n", 6, "--temp", 0, "--kv", "f32", input="the cat\n")
    peaks = {"bandwidth": 1e10, "f32": 1e11}
    monkeypatch.setattr("treadle.cli.commands.bench.measured_peaks", lambda *_: peaks)
    timed = json.loads(
        ran("bench", path, "-p", 32, "-n", 4, "-d", "0,9", "-s", 2, "-r", 1, "--json")
    )
    assert [each["test"] for each in timed] == ["pp32", "tg4"] * 2
    assert all(each["tok_s"] > 0 and each["ops_s"] > 0 for each in timed)


@pytest.mark.slow
def test_the_check(path: Path) -> None:
    """Kernels beside their twins, bits by threads, a text: over a prompt of random tokens."""
    assert "passed in" in ran("check", path, "--quick")
    with opened(path) as model:
        encoder = model.engine.encoder
        assert encoder is not None
        compile_plans(model)
        assert len(encoder._cross._plans) > 1


def test_a_bench_beside_llama_cpp(path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(path), "--against", "llama-cpp-python"])
    assert result.exit_code
    assert "only treadle is benchmarked" in result.output


# -- the list of prompts ---------------------------------------------------------------------------


def test_least_recently_used_prompts_give_way(model: Model) -> None:
    cache = model.engine.cache
    cache.forget()
    inputs = cache.inputs
    assert isinstance(inputs, EncodedInputs)
    (pool,) = cache.cross
    n = pool.n_pages // 3 * PAGE  # tokens of a third of the pages
    first, second, third = ((i,) * n for i in range(3))
    for ids in (first, second, third, first):
        inputs.hold(ids).drop()
    assert len(inputs) == 3
    kept = inputs.hold((9,) * n)  # in place of the second
    assert [ids in inputs for ids in (first, second, third)] == [True, False, True]
    others = [inputs.hold(first), inputs.hold(third)]
    with pytest.raises(NoRoomError):
        inputs.hold(second)
    for keys in (kept, *others):
        keys.drop()
    inputs.forget()
    assert (len(inputs), n_used(model)) == (0, 0)


def test_a_damaged_file_ends_only_its_own_requests(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = model.engine.encoder
    assert encoder is not None

    def fail(prompts: Any) -> Iterator[None]:
        if prompts:
            raise TreadleError("the file shrank")
        yield

    model.engine.cache.forget()
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "encode", fail)
        with pytest.raises(TreadleError, match="the file shrank"):
            model.generate(SOURCES[3], max_tokens=2).finish()
    assert model.generate(SOURCES[3], max_tokens=2, temperature=0).finish() is not None
    assert is_idle(model)
