"""What a user of the library sees: loading, settings, numbers, chat."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.kernels.rows import ALL
from tests.kvcache.test_cache import check_pages
from tests.tiny import without_vocabulary
from treadle.api.options import packaged_model
from treadle.chat.template.template import ChatTemplate
from treadle.errors import (
    ContextFullError,
    FileError,
    NoRoomError,
    SamplingError,
    TemplateError,
    TreadleError,
    UnsupportedError,
)
from treadle.formats import FORMATS, by_name
from treadle.isa import choose
from treadle.isa.isa import Isa
from treadle.jit.host import host_features
from treadle.machine.topology import usable_threads

GREEDY = treadle.Sampling(temperature=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads=0: expected 1 to 1024"),
        ({"threads": 1025}, "threads=1025"),
        ({"context": 0}, "context=0: expected at least 1"),
        ({"n_sequences": 0}, "n_sequences=0: expected at least 1"),
        ({"kv_bytes": 0}, "kv_bytes=0: expected at least 1"),
        ({"kv_tokens": 0}, "kv_tokens=0: expected at least 1"),
        ({"kv_bytes": 1e9}, r"kv_bytes=1000000000\.0: expected an integer"),
        ({"kv": "f17"}, "unknown KV format 'f17'"),
        ({"device": None}, "device=None: expected one of cpu, "),
        ({"isa": "sse9"}, "^isa='sse9': unknown instruction set; choose one of"),
        ({"threads": "2"}, "threads='2': expected an integer"),
        ({"context": 9.5}, r"context=9\.5: expected an integer"),
        ({"n_sequences": None}, "n_sequences=None: expected an integer"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str, tiny: WriteTiny) -> None:
    with pytest.raises(TreadleError, match=message):
        treadle.load(tiny(), **settings)


def test_files_that_are_not_there_or_not_models(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileError):
        treadle.load(tmp_path / "absent.gguf")
    monkeypatch.chdir(tmp_path)  # which an empty Path would be
    with pytest.raises(FileError, match="an empty name"):
        treadle.load("")
    (tmp_path / "text.gguf").write_text("once upon a time")
    with pytest.raises(FileError, match=r"text\.gguf"):
        treadle.load(tmp_path / "text.gguf")
    with pytest.raises(UnsupportedError, match="superpoint"):
        treadle.load(data / "models" / "other" / "superpoint.gguf")
    with pytest.raises(FileError, match="vocabulary only"):
        treadle.load(data / "vocab" / "ggml-vocab-llama-spm.gguf")
    monkeypatch.delitem(FORMATS, by_name("Q5_0").ggml_id)
    with pytest.raises(UnsupportedError, match="Q5_0"):
        treadle.load(data / "models" / "babyllama105" / "babyllama105-Q5_0.gguf").plan()


def test_defaults(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with treadle.load(tiny(n_ctx=100)) as model:
        assert model.n_ctx == 100
        assert model.n_threads == usable_threads()[0]
        assert model.isa is choose(host_features())
    with treadle.load(str(tiny(n_ctx=1 << 20))) as model:
        assert model.n_ctx == 4096
    with treadle.load(tiny(n_ctx=100), context=200, threads=3) as model:
        assert (model.n_ctx, model.n_threads) == (200, 3)
    monkeypatch.setenv("TREADLE_ISA", "portable")
    with treadle.load(tiny()) as model:
        assert model.isa.name == "portable"


def test_few_bytes_for_keys_and_values(tiny: WriteTiny) -> None:
    """A text may be as long as the context where it is alone; two take turns."""
    page = 3 * 2 * 2 * 32 * 32 * 2  # layers, keys and values, key heads, dims, tokens, f16
    path = tiny(n_head_kv=2)
    given: dict[str, Any] = {"threads": 1, "context": 128, "deterministic": True}
    with treadle.load(path, n_sequences=2, kv_bytes=5 * page, **given) as model:
        assert (model.engine.cache.n_bytes, model.n_ctx) == (5 * page, 128)
        alone = [model.generate([i] * 100, max_tokens=20, temperature=0).finish() for i in (5, 6)]
        both = model.generate_many([[5] * 100, [6] * 100], max_tokens=20, temperature=0)
        assert [made.text for made in both] == alone
    with treadle.load(path, kv_bytes=2 * page, **given) as model:
        assert model.generate([5] * 40, max_tokens=10).finish()
        with pytest.raises(NoRoomError, match="capacity 64 tokens"):
            model.generate([5] * 100, max_tokens=10).finish()


def test_few_tokens_for_keys_and_values(tiny: WriteTiny) -> None:
    """One text may have them all; two that are long take turns."""
    path = tiny(n_head_kv=2, n_ctx=1 << 20)
    given: dict[str, Any] = {"threads": 1, "n_sequences": 2, "deterministic": True}
    with treadle.load(path, kv_tokens=10_000, **given) as model:
        assert (model.n_ctx, model.engine.cache.n_tokens) == (10_000, 10_000)
    with treadle.load(path, kv_tokens=128, **given) as model:
        assert model.n_ctx == 128
        alone = [model.generate([i] * 100, max_tokens=20, temperature=0).finish() for i in (5, 6)]
        both = model.generate_many([[5] * 100, [6] * 100], max_tokens=20, temperature=0)
        assert [made.text for made in both] == alone
        with pytest.raises(ContextFullError):
            model.generate([5] * 129, max_tokens=1).finish()
    with treadle.load(tiny(n_ctx=100), kv_tokens=1000, **given) as model:
        assert model.n_ctx == 100


@pytest.mark.slow
def test_the_model_inside_the_package() -> None:
    assert packaged_model().is_file()
    with treadle.load(threads=2, context=64) as model:
        made = model.generate("def add(a, b):", max_tokens=6, sampling=GREEDY)
        assert made.finish()
        model.plan(64, 1).check()


@pytest.mark.usefixtures("own_kernels")
def test_progress_is_told(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.jit import kernel

    told: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    with treadle.load(tiny(), threads=1, progress=progress) as model:
        plan = model.plan()
        tally = model.engine.kernels
    n = len(plan.specs())
    assert (tally.n_compiled, tally.n_cached) == (n + 1, 0)  # and the loop that runs them
    assert tally.seconds > 0
    monkeypatch.setattr(kernel, "_linked", {})
    with treadle.load(tiny(), threads=1) as model:
        model.plan()
        assert (model.engine.kernels.n_compiled, model.engine.kernels.n_cached) == (0, n + 1)
    assert {stage for stage, _, _ in told} == {"compile"}
    assert told[-1] == ("compile", n + 1, n + 1)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


@pytest.mark.parametrize("fmt", ["F32", "Q4_0"])
def test_logits_of_every_token(fmt: str, tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", fmt), threads=2, deterministic=True, context=300) as model:
        ids = list(range(3, 303))
        logits = model.logits(ids)
        assert logits.shape == (300, model.config.n_vocab)
        assert logits.dtype == np.float32
        assert np.array_equal(model.logits(tuple(ids[:10])), logits[:10])
        with pytest.raises(ContextFullError, match="301 tokens do not fit the context of 300"):
            model.logits([3] * 301)
        with pytest.raises(TreadleError, match="no tokens"):
            model.logits([])
        with pytest.raises(TreadleError, match=r"outside 0\.\.319"):
            model.logits([320])
        check_pages(model.engine.cache, [])


def test_numbers_find_room_beside_a_text_that_fills_the_cache(tiny: WriteTiny) -> None:
    """The model's own session gives way, and what it was writing goes on as if nothing were."""
    with treadle.load(tiny("llama", tied=0), threads=2, context=128) as model:
        alone = model.generate([7] * 50, max_tokens=70, sampling=GREEDY)
        alone.finish()
        made = model.generate([7] * 50, max_tokens=70, sampling=GREEDY)
        for _ in range(35):
            next(made)
        assert model.logits([9] * 128).shape[0] == 128
        model.embed(["x" * 100])
        model.profile(1, depth=100)
        made.finish()
        assert made.ids == alone.ids
        other = model.session()
        other.feed([5] * 100)
        with pytest.raises(ContextFullError, match="no free page"):
            model.logits([9] * 128)  # a session of the user's own does not give way
        other.close()


def test_embed(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=2) as model:
        rows = model.embed(["one text", "another", "one text"])
        assert rows.shape == (3, model.config.n_embd)
        assert rows.dtype == np.float32
        assert np.array_equal(rows[0], rows[2])
        assert not np.allclose(rows[0], rows[1])
        (ids,) = [model.tokenize("one text")]
        assert np.array_equal(model.engine.embed([ids]), model.embed("one text"))
        assert np.abs(model.embed("one text") - rows[:1]).max() < 1e-3  # other kernels: KV is f16
        assert model.embed([]).shape == (0, model.config.n_embd)
        pooled = model.embed(["one text", "another"], normalize=False)
        lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
        assert np.abs(lengths - 1.0).max() > 0.1
        assert np.allclose(pooled / lengths, model.embed(["one text", "another"]), atol=1e-6)
        cut = model.embed(["one text", "another"], dimensions=10)
        lengths = np.linalg.norm(pooled[:, :10], axis=1, keepdims=True)
        assert np.allclose(cut, pooled[:, :10] / lengths, atol=1e-6)
        assert model.embed([], dimensions=10).shape == (0, 10)
        with pytest.raises(TreadleError, match="dimensions=65: expected 1 to 64"):
            model.embed("one text", dimensions=65)
        with pytest.raises(TreadleError, match="the text is empty"):
            model.embed(["one", ""])
        for texts in ([None], ["one", None]):
            with pytest.raises(TreadleError, match="the text is NoneType: expected a str"):
                model.embed(texts)  # type: ignore[arg-type]
        assert np.array_equal(model.embed([ids]), model.embed("one text"))
        for wrong, why in (
            ([[]], "no tokens"),
            ([[-1]], "outside 0"),
            (["a", [1, "b"]], r"\[1\]: "),
        ):
            with pytest.raises(TreadleError, match=why):
                model.embed(wrong)  # type: ignore[arg-type]
        with pytest.raises(TreadleError, match="texts: expected a list, found bytes"):
            model.embed(b"one")  # type: ignore[arg-type]


def test_text_to_ids_and_back(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        ids = model.tokenize("héllo</s>")
        assert ids[-1] == model.tokenizer.eos
        text = model.detokenize(ids)
        assert text.endswith("héllo")
        assert model.detokenize(iter(ids), special=True) == f"{text}</s>"
        assert model.tokenize("héllo</s>", special=False)[-1] != model.tokenizer.eos
        assert model.tokenize("a", bos=True)[0] == model.tokenizer.bos == 1


class Template:
    """A chat template that is easy to read."""

    stop = ("[",)

    def is_off(self, *_: Any) -> bool:
        return False

    def render_read(self, messages: list[dict[str, Any]], _: None, **settings: Any) -> str:
        assert settings == {"add_generation_prompt": True, "tools": None}
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


@pytest.mark.parametrize("said", ["no_vocab", None])
def test_ids_of_a_file_without_a_vocabulary(
    said: str | None, tiny: WriteTiny, tmp_path: Path
) -> None:
    """The ids that the same weights give with one, and no text."""
    path = without_vocabulary(tiny(), tmp_path / "bare.gguf", said)
    ids = [5, 6, 7] * 10
    with treadle.load(tiny(), threads=1) as model, treadle.load(path, threads=1) as bare:
        settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
        expected = model.generate(ids, **settings, ignore_eos=True)
        expected.finish()
        made = bare.generate(ids, **settings, logprobs=1)
        assert "".join(made) == made.text == ""
        assert made.finish_reason == "length"
        assert made.ids == expected.ids
        assert len(made.logprobs or ()) == 12
        many = list(bare.generate_many([ids, ids[:7]], **settings))
        assert many[0].ids == expected.ids
        assert len(many[1].ids) == 12
        refused: list[tuple[Any, dict[str, Any]]] = [
            ("a text", {}),
            (ids, {"stop": "x"}),
            (ids, {"regex": "a+"}),
        ]
        for prompt, more in refused:
            with pytest.raises(UnsupportedError, match=r"no (vocabulary|tokenizer)"):
                bare.generate(prompt, **settings, **more)
        with pytest.raises(SamplingError, match="DRY needs the tokenizer"):
            bare.generate(ids, **settings, dry_multiplier=0.8)
        assert bare.media is None
        assert not bare.modalities


def test_chat(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        vars(model)["template"] = ChatTemplate(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        talk: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        assert model.chat_prompt(talk) == "[user]hi[assistant]"
        made = model.chat(talk, max_tokens=3, sampling=GREEDY)
        assert made.prompt_ids == model.tokenize("[user]hi[assistant]")
        made.finish()
        assert made.timings.n_generated
        # words put into the model's mouth
        talk += [{"role": "assistant", "content": "Well, "}]
        assert model.chat_prompt(talk) == "[user]hi[assistant]Well, "
        assert model.chat_prompt(talk[1:]) == "[assistant]Well, [assistant]"
        parts: list[dict[str, Any]] = [{"type": "text", "text": t} for t in ("Well, ", "no")]
        talk[1]["content"] = parts
        assert model.chat_prompt(talk) == "[user]hi[assistant]Well, \nno"
        parts += [{"type": "image_url", "image_url": {"url": "a.png"}}]
        text = model.chat_prompt(talk)
        assert text.startswith("[user]hi[assistant]Well, \nno\n[A picture (a.png) was sent here.")
        parts[-1] = {"type": "video_url"}
        with pytest.raises(UnsupportedError, match="message 1: parts of type 'video_url'"):
            model.chat_prompt(talk)
        with pytest.raises(TemplateError, match="messages is empty"):
            model.chat([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.chat("hi"), "messages is str: expected a list"),
        (lambda m: m.chat(["hi"]), "message 0 is str: expected a dict"),
        (lambda m: m.chat([{"content": "x"}]), "message 0 has no role"),
        (lambda m: m.chat([{"role": "user"}]), "message 0 has no content"),
        (lambda m: m.detokenize([5, 99999]), "token 99999: the vocabulary has 320 tokens"),
        (lambda m: m.detokenize("abc"), "token ids: expected a list, found str"),
        (lambda m: m.tokenize(b"abc"), "the text is bytes: expected a str"),
        (lambda m: m.generate(b"Once"), "token ids: expected a list, found bytes"),
        (lambda m: m.generate([5, "6"]), "a token id='6': expected an integer"),
        (lambda m: m.generate(None), "token ids: expected a list, found NoneType"),
        (lambda m: m.generate([]), "the prompt is empty"),
        (lambda m: m.generate("a", sampling=0.5), "sampling is float: expected a treadle.Sampling"),
        (lambda m: m.generate("a", max_tokens="5"), "max_tokens='5': expected an integer"),
        (lambda m: m.generate("a", stop=[7]), "stop: expected a str or a list of them, found 7"),
        (lambda m: m.generate("a", stop=7), "stop: expected a str or a list of them, found int"),
        (lambda m: m.generate("a", grammar=7), "the grammar is int: expected a str"),
        (lambda m: m.generate("a", session="x"), "the session belongs to another model"),
        (lambda m: treadle.load_session("x", m.path), "expected a treadle.Model"),
        (lambda m: m.logits(b"abc"), "token ids: expected a list, found bytes"),
        (lambda m: m.session().feed(b"abc"), "token ids: expected a list, found bytes"),
    ],
)
def test_wrong_types_are_told_in_one_line(call: Any, message: str, tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        vars(model)["template"] = Template()
        with pytest.raises(TreadleError) as caught:
            call(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stop_string_alone_is_one(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        vars(model)["template"] = Template()
        text = model.generate("a", max_tokens=12, sampling=GREEDY).finish()
        stop = text[3:6]
        made = model.generate("a", max_tokens=12, sampling=GREEDY, stop=stop)
        assert made.finish() == text[: text.index(stop)]
        assert model.generate("a", max_tokens=12, sampling=GREEDY, stop=None).finish() == text
        talk = [{"role": "user", "content": "hi"}]
        assert model.chat(talk, stop="Lily")._request.answer.stop == ["Lily", "["]
        assert model.chat(talk, stop=None)._request.answer.stop == ["["]


def test_settings_by_name(tiny: WriteTiny) -> None:
    """Any field of a Sampling; it counts before that of a Sampling that is given too."""
    with treadle.load(tiny(tied=0), threads=1, context=100) as model:
        seeded = treadle.Sampling(temperature=5.0, seed=3, top_k=0)
        cases: list[tuple[dict[str, Any], treadle.Sampling]] = [
            ({"temperature": 0}, treadle.Sampling(temperature=0)),
            ({"temperature": 5, "seed": 3, "top_k": 0}, seeded),
        ]
        for fields, sampling in cases:
            made = model.generate("a", max_tokens=20, **fields)
            made.finish()
            expected = model.generate("a", max_tokens=20, sampling=sampling)
            expected.finish()
            assert made.ids == expected.ids
            assert made._request.sampler.settings == sampling
        made = model.generate("a", sampling=seeded, temperature=0.5)
        assert made._request.sampler.settings == replace(seeded, temperature=0.5)
        made = model.chat([{"role": "user", "content": "hi"}], top_p=0.5, max_tokens=3)
        assert made._request.sampler.settings.top_p == 0.5
        for name, hint in (
            ("temprature", "; did you mean 'temperature'\\?"),
            ("max_token", "; did you mean 'max_tokens'\\?"),
            ("n_predict", "; did you mean 'max_tokens'\\?"),
            ("n_ctx", "; 'context' is a setting of load"),
            ("stream", "; leave it out: the result is an iterator"),
            ("zzz", "$"),
        ):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'{hint}"):
                model.generate("a", **{name: 1})  # type: ignore[arg-type]
        with pytest.raises(SamplingError, match="top_p = 7"):
            model.generate("a", top_p=7)


def test_a_prompt_that_is_read_anew(tiny: WriteTiny) -> None:
    """As in the server: its text is the same, and nothing of it comes from the cache."""
    with treadle.load(tiny("llama", "F32")) as model:
        ids = [i % 90 for i in range(70)]
        texts = []
        uses = []
        for cache_prompt in (True, True, False):
            made = model.generate(ids, max_tokens=3, temperature=0, cache_prompt=cache_prompt)
            texts.append(made.finish())
            uses.append((made.timings.cache.memory > 0, made.timings.cache.why))
    assert texts[0] == texts[1] == texts[2]
    assert uses == [(False, "new"), (True, "end"), (False, "off")]


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba2"])
def test_a_sessions_prompt_that_is_read_anew(arch: str, tiny: WriteTiny) -> None:
    """Neither what the session holds nor the cache is used; afterwards both have it."""
    settings: dict[str, Any] = {"threads": 1, "n_sequences": 2, "deterministic": True}
    with treadle.load(tiny(arch, window=16), context=128, **settings) as model:
        ids = [i % 90 for i in range(70)]
        made = []
        with model.session() as session:
            for anew in (False, True, True, False):
                made.append(
                    model.generate(
                        ids, session=session, max_tokens=3, temperature=0, cache_prompt=not anew
                    )
                )
                made[-1].finish()
                assert session.ids[:70] == ids
                check_pages(model.engine.cache, [session.seq])
            assert len({tuple(each.ids) for each in made}) == 1
            last, cached = ("state", False) if arch == "mamba2" else ("end", True)
            assert [each.timings.cache.why for each in made] == ["new", "off", "off", last]
            assert [each.timings.n_cached > 0 for each in made] == [False, False, False, cached]
        with model.session() as other:
            assert other.match(ids) == 64


def test_no_limit_but_the_context(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1, context=50) as model:
        for limit in (-1, None):
            made = model.generate([5] * 10, max_tokens=limit, ignore_eos=True)
            made.finish()
            assert (len(made.ids), made.finish_reason) == (40, "context")
        with pytest.raises(TreadleError, match="max_tokens=-2: expected 0 or more, or -1"):
            model.generate("a", max_tokens=-2)


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no think>{% endif %}"
)


def test_variables_of_a_chat_template(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        vars(model)["template"] = ChatTemplate(THINKING, tool_source="{{ tool_mode }}")
        talk = [{"role": "user", "content": "hi"}]
        assert model.chat_prompt(talk) == "[user]hi[assistant]"
        quiet = "[user]hi[assistant]<no think>"
        assert model.chat_prompt(talk, enable_thinking=False) == quiet
        assert model.chat_prompt(talk, template={"enable_thinking": False}) == quiet
        assert model.chat_prompt(talk, template={"no_such_thing": 1}) == "[user]hi[assistant]"
        started = [*talk, {"role": "assistant", "content": "Well"}]
        assert model.chat_prompt(started, enable_thinking=False) == f"{quiet}Well"
        assert model.chat_prompt(talk, tools=[{}], tool_mode="x") == "x"
        made = model.chat(talk, enable_thinking=False, max_tokens=1, temperature=0)
        assert made.prompt_ids == model.tokenize(quiet)
        for name, hint in (
            ("enable_thinkng", "'enable_thinking'"),
            ("temprature", "'temperature'"),
            ("content", "None"),  # of a message, not a variable
        ):
            with pytest.raises(TypeError, match=f"{name}': neither a setting") as caught:
                model.chat(talk, **{name: False})
            assert (hint == "None") or str(caught.value).endswith(f"; did you mean {hint}?")


@pytest.mark.slow
def test_what_a_model_says_of_itself(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tmp_path / "<b>&'x'.gguf"
    path.write_bytes(tiny("llama", "Q8_0").read_bytes())
    size = f"{path.stat().st_size / 1024:.0f} KiB"
    with treadle.load(path, threads=2, context=100, kv="q8_0") as model:
        assert repr(model) == (
            f"""Model("<b>&'x'.gguf", llama, 150K parameters, Q8_0, {size}, """
            "2 threads, context of 100 tokens)"
        )
        html = model._repr_html_()
        parsed = ElementTree.fromstring(html)  # well-formed, so nothing of the name is a tag
        cells = {row[0].text: row[1].text for row in parsed.iter("tr")}
        assert cells["file"] == path.name
        assert cells["architecture"] == "llama"
        assert cells["keys and values"] == "q8_0, 67.5 KiB for 100 tokens"
        assert cells["context"] == "100 tokens"
        session = model.session()
        assert repr(session) == "Session(0 of 100 tokens)"
        session.feed([5, 6, 7])
        assert repr(session) == "Session(3 of 100 tokens)"
        session.close()
        assert repr(session) == "Session(closed)"
        made = model.generate("a", max_tokens=5, temperature=0)
        assert repr(made) == "Generation('', 0 tokens, not finished)"
        made.finish()
        assert repr(made) == f"Generation({made.text!r}, 5 tokens, finish_reason 'length')"
        made.text = "word " * 100
        assert len(repr(made)) <= 110
    assert repr(model) == """Model("<b>&'x'.gguf", closed)"""
    assert "closed" in model._repr_html_()


def test_a_model_says_that_it_stays_in_its_process(tiny: WriteTiny) -> None:
    """As an argument of a worker of multiprocessing, or a method of it."""
    with treadle.load(tiny(), threads=1) as model:
        for thing in (model, model.generate):
            with pytest.raises(TypeError, match="load it in each process"):
                pickle.dumps(thing)


def test_a_template_that_writes_bos_itself_gets_one(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        template: Any = Template()
        vars(model)["template"] = template
        template.render_read = lambda messages, *_, **__: "<s>" + messages[0]["content"]
        made = model.chat([{"role": "user", "content": "hi"}], max_tokens=1)
        assert made.prompt_ids.count(1) == 1


@pytest.mark.slow
def test_a_model_that_is_forgotten_leaves_nothing_behind(tiny: WriteTiny) -> None:
    def workers() -> int:
        return sum(thread.name.startswith("treadle-") for thread in threading.enumerate())

    gc.collect()  # models of other tests
    before = workers()
    model = treadle.load(tiny(), threads=3)
    model.generate("abc", max_tokens=2).finish()
    assert workers() == before + 2
    del model
    gc.collect()
    assert workers() == before


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_a_closed_model_lets_go_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny import write_model

    # An empty cache: plans of later runs are made while the first one's kernels are compiled.
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    path = tmp_path / "closing.gguf"
    write_model(path)

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    model = treadle.load(path, threads=2)
    model.logits([3, 4, 5])
    assert mapped()
    model.close()
    assert not mapped()
    calls: list[Callable[[], object]] = [
        lambda: model.logits([3]),
        lambda: model.tokenize("a"),
        lambda: model.chat([{"role": "user", "content": "a"}]),
        lambda: model.plan(64),
    ]
    for call in calls:
        with pytest.raises(TreadleError, match=r"^the model is closed$"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ALL, ids=lambda row: row.name)
def test_every_instruction_set_of_this_machine_by_name(isa: Isa, tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1, isa=isa.name) as model:
        assert model.isa is isa
        assert model.generate("abc", max_tokens=1).finish() is not None
