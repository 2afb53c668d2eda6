"""Pictures by the library: where they may stand, and what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.errors import ContextFullError, FileError, TreadleError, UnsupportedError
from treadle.media.prepared import PreparedMedia

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}" + MARK + "{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def media(data: Path) -> Path:
    return data / "media"


@pytest.fixture(scope="module")
def model(media: Path) -> Iterator[treadle.Model]:
    path = media / "qwen3vl" / "text.gguf"
    with treadle.load(
        path, kv="f32", threads=1, context=512, n_sequences=2, chat_template=TEMPLATE
    ) as made:
        yield made


def ask(source: object, text: str = "hello") -> list[dict[str, object]]:
    parts = [{"type": "image", "image": source}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_every_form_of_a_picture_gives_the_same_prompt(model: treadle.Model, media: Path) -> None:
    from base64 import b64encode

    from PIL import Image

    path = media / "media" / "plain.png"
    raw = path.read_bytes()
    url = f"data:image/png;base64,{b64encode(raw).decode()}"
    forms = [path, str(path), raw, Image.open(path), np.asarray(Image.open(path)), url]
    answers = [model.chat(ask(each), max_tokens=4, temperature=0) for each in forms]
    answers.append(
        model.chat(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "hello"},
                    ],
                }
            ],
            max_tokens=4,
            temperature=0,
        )
    )
    assert len({tuple(each.prompt_ids) for each in answers}) == 1
    assert len({each.finish() for each in answers}) == 1
    assert model.modalities == {"image"}


def test_generate_with_media(model: treadle.Model, media: Path) -> None:
    path = media / "media" / "plain.png"
    marked = model.generate("a <__media__> b", media=[path], max_tokens=2)
    chat = model.chat(ask(path, " b"), max_tokens=2)
    assert marked.prompt_ids[2:] == chat.prompt_ids
    before = model.generate("b", media=[path], max_tokens=2)
    assert before.prompt_ids[:-1] == chat.prompt_ids[: len(before.prompt_ids) - 1]
    with pytest.raises(
        TreadleError,
        match="the prompt has <__media__> 1 time: expected 2",
    ):
        model.generate("a <__media__>", media=[path, path])
    with pytest.raises(TreadleError, match="prompt that is text"):
        model.generate([1, 2], media=[path])


def test_the_answer_has_no_marks(model: treadle.Model, media: Path) -> None:
    """Even where the model would write them: their tokens are never chosen."""
    assert model.media is not None
    ids = model.media.mark_ids
    assert len(ids) >= 3
    bias = dict.fromkeys(range(280), float("-inf"))
    answer = model.generate(
        "x", media=[media / "media" / "plain.png"], max_tokens=8, logit_bias=bias
    )
    answer.finish()
    assert answer.ids
    assert not set(answer.ids) & set(ids)


def test_ids_of_pictures_are_not_given_by_others(model: treadle.Model, media: Path) -> None:
    """A prompt of ids cannot name another request's picture."""
    answer = model.chat(ask(media / "media" / "plain.png"), max_tokens=1)
    with pytest.raises(TreadleError, match="a token id outside"):
        model.generate(list(answer.prompt_ids), max_tokens=1)


def test_a_users_own_mark_stays_text(model: treadle.Model, media: Path) -> None:
    path = media / "media" / "plain.png"
    answer = model.chat(ask(path, f"what is {MARK}?"), max_tokens=1)
    first = model.engine.media.first_id
    plain = model.chat(ask(path, "x"), max_tokens=1)
    n_rows = sum(id >= first for id in plain.prompt_ids)
    assert sum(id >= first for id in answer.prompt_ids) == n_rows
    (pad,) = model.tokenize("<|image_pad|>", bos=False)
    assert pad not in answer.prompt_ids


@pytest.mark.slow
def test_drafts_penalties_and_logprobs_count_text(media: Path) -> None:
    """Rows of a picture are no tokens: drafts continue the text alone, penalties and DRY leave
    them out, and the probabilities are those of the text's tokens.
    """
    path = media / "qwen3vl" / "text.gguf"
    prompt = "<__media__>" + "abc abc abc abc abc abc "
    given: dict[str, Any] = {"media": [media / "media" / "plain.png"], "max_tokens": 24}
    given |= {"temperature": 0, "logprobs": 1}
    made = {}
    for speculate in (False, True):
        with treadle.load(path, threads=1, context=512, speculate=speculate, kv="f32") as model:
            assert model.media is not None
            answer = model.generate(prompt, **given)
            answer.finish()
            made[speculate] = answer
            first = model.engine.media.first_id
            assert any(id >= first for id in answer.prompt_ids)
            assert not any(id >= first for id in answer.ids)
            n_vocab = len(model.logits([65])[0])
            assert answer.logprobs is not None
            assert all(entry.id < n_vocab for entry in answer.logprobs)
            with model.session() as session:
                row = session.feed(list(answer.prompt_ids)).copy()
            seen = [id for id in set(answer.prompt_ids) if id < first]
            row[seen] = np.where(row[seen] > 0, row[seen] / 3, row[seen] * 3)
            row[list(model.media.mark_ids)] = -np.inf
            rules = {"repeat_penalty": 3.0, "repeat_last_n": 400}
            punished = model.generate(prompt, **{**given, **rules, "max_tokens": 1})
            punished.finish()
            assert punished.ids == [int(row.argmax())]
            dry = {"presence_penalty": 1.0, "dry_multiplier": 0.8, "dry_allowed_length": 1}
            assert model.generate(prompt, **{**given, **dry}).finish() != answer.text
    assert made[True].ids == made[False].ids
    assert made[True].timings.n_drafted > 0
    assert made[False].timings.n_drafted == 0


def test_too_many_and_too_long(model: treadle.Model, media: Path) -> None:
    """Refused before the tower runs."""
    path = media / "media" / "plain.png"
    before = model.stepper.scheduler.media.n_encoded
    parts = [{"type": "image", "image": path}] * 33
    with pytest.raises(UnsupportedError, match="33 pictures and sounds: the limit is 32"):
        model.chat([{"role": "user", "content": parts}])
    with pytest.raises(ContextFullError, match="do not fit the context of 512"):
        model.chat([{"role": "user", "content": parts[:10]}])
    assert model.stepper.scheduler.media.n_encoded == before
    with treadle.load(media / "qwen3vl" / "text.gguf", threads=1, context=64) as small:
        with pytest.raises(ContextFullError, match="77 tokens do not fit the context of 64"):
            small.generate("", media=[path], max_tokens=1)
        assert small.stepper.scheduler.media.n_encoded == 0


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (b"\x89PNG\r\n\x1a\n", FileError, "content"),
        (b"not a picture", UnsupportedError, "content"),
        (b"<svg></svg>", UnsupportedError, "SVG"),
        (3, TreadleError, "expected"),
        ("missing.png", FileError, "missing.png"),
    ],
)
def test_bad_pictures(
    source: object, error: type[Exception], said: str, model: treadle.Model
) -> None:
    with pytest.raises(error, match=said):
        model.chat(ask(source))


def test_image_max_tokens(media: Path) -> None:
    path = media / "qwen3vl" / "text.gguf"
    picture = np.full((600, 800, 3), 200, np.uint8)
    with treadle.load(
        path, threads=1, context=2048, chat_template=TEMPLATE, image_max_tokens=64
    ) as model:
        answer = model.chat(ask(picture), max_tokens=1)
        assert 32 < sum(id >= model.engine.media.first_id for id in answer.prompt_ids) <= 64
    with treadle.load(path, threads=1, context=2048, chat_template=TEMPLATE) as model:
        parts = [
            {"type": "image_url", "image_url": {"url": "x", "detail": "lowest"}},
        ]
        with pytest.raises(TreadleError, match="detail is 'lowest'"):
            model.chat([{"role": "user", "content": parts}])


def test_a_model_without_its_projector(media: Path, tmp_path: Path) -> None:
    """A picture becomes a sentence, with a warning; with ``strict`` it is an error."""
    copy(media / "qwen3vl" / "text.gguf", tmp_path / "text.gguf")
    path = media / "media" / "plain.png"
    with treadle.load(tmp_path / "text.gguf", threads=1, chat_template=TEMPLATE) as model:
        assert not model.modalities
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.chat(ask(path), max_tokens=1).finish()
        assert "a picture" in str(seen[0].message)
        with pytest.raises(UnsupportedError, match="no projector"):
            model.generate("x", media=[path])
    with (
        treadle.load(
            tmp_path / "text.gguf", threads=1, chat_template=TEMPLATE, strict=True
        ) as model,
        pytest.raises(UnsupportedError),
    ):
        model.chat(ask(path))
    with pytest.raises(TreadleError, match="no projector file beside it"):
        treadle.load(tmp_path / "text.gguf", threads=1, mmproj=True)


def test_a_projector_that_does_not_fit(media: Path) -> None:
    path = media / "qwen3vl" / "text.gguf"
    with pytest.raises(TreadleError, match="rows are for models of type"):
        treadle.load(path, threads=1, mmproj=media / "gemma3" / "mmproj.gguf")
    with pytest.raises(FileError):
        treadle.load(path, threads=1, mmproj=media / "qwen3vl" / "missing.gguf")
    with pytest.raises(TreadleError):
        treadle.load(path, threads=1, mmproj=path)
    with treadle.load(path, threads=1, mmproj=False) as model:
        assert not model.modalities


def test_pictures_of_several_requests_share_a_run(
    media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one size, while they wait; their rows have the bits that they have alone."""
    path = media / "qwen2vl" / "text.gguf"
    pictures = [np.random.default_rng(i).integers(0, 256, (61, 97, 3), np.uint8) for i in range(3)]
    settings: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
    with treadle.load(path, kv="f32", threads=1, context=256, n_sequences=4) as model:
        assert model.media is not None
        projector = model.media.projector
        sizes: list[int] = []
        encode_runs = projector.encode_runs

        def noted(prepared: Sequence[PreparedMedia], *rest: Any) -> Any:
            sizes.append(len(prepared))
            return encode_runs(prepared, *rest)

        monkeypatch.setattr(projector, "encode_runs", noted)
        alone = [model.generate("see", media=[each], **settings).finish() for each in pictures]
        entries = list(model.engine.media._by_number.values())
        rows = [entry.rows for entry in entries]
        assert sizes == [1] * 3
        model.engine.cache.forget()
        for entry in entries:
            entry.rows = None
        made = [model.generate("see", media=[each], **settings) for each in pictures]
        for each in made:
            each.begin(look_ahead=math.inf)
        assert [each.finish() for each in made] == alone
        assert sizes == [1] * 3 + [3]
        for entry, expected in zip(entries, rows, strict=True):
            assert expected is not None
            assert entry.rows is not None
            assert np.array_equal(entry.rows, expected)
