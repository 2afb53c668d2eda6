"""Defaults of answers that ``load`` takes: template, variables, reasoning, sampling, seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treadle
from treadle.api.options import Defaults, read_defaults
from treadle.api.tool_chat import Reply
from treadle.errors import SamplingError, TemplateError, TreadleError

HELLO = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OPENED = TURNS + "<think>\n{# </think> #}"  # every answer begins with reasoning
SWITCHED = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
SWITCHED += "{# </think> #}"


@pytest.fixture(scope="module")
def model(one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with treadle.load(threads=1, context=256) as model:
        yield model


@pytest.fixture
def given(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the model other defaults, as ``load`` would."""

    def give(**settings: Any) -> treadle.Model:
        defaults = read_defaults(**settings)
        template = defaults.load_template(model.gguf, model.config.arch.name)
        monkeypatch.setitem(vars(model), "template", template)
        monkeypatch.setattr(model, "sampling", defaults.sampling_over(model.sampling))
        return model

    return give


def test_load_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TURNS + "{{ mood }}")
    settings: dict[str, Any] = {
        "chat_template": path,
        "chat_template_kwargs": {"mood": "glad"},
        "reasoning": "off",
        "sampling": {"temperature": 0.25, "top_k": 7},
        "seed": 5,
    }
    with treadle.load(threads=1, context=64, **settings) as model:
        assert model.chat_prompt(HELLO) == "<user>hi<assistant>glad"
        assert model.chat_prompt(HELLO, mood="sad") == "<user>hi<assistant>sad"
        assert model.template.origin == "file mine.jinja, by option"
        assert "mine.jinja" in repr(model.template)
        assert model.template.default_reasoning == "off"
        sampling = model.sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.25, 7, 5)
        assert sampling.top_p == treadle.Sampling().top_p
    with treadle.load(threads=1, context=64, chat_template="chatml") as model:
        assert model.chat_prompt(HELLO).startswith("<|im_start|>user\nhi<|im_end|>")
        assert model.template.builtin == "chatml"


def test_sampling_may_be_whole(given: Any) -> None:
    whole = treadle.Sampling(temperature=0.5, seed=3)
    assert given(sampling=whole).sampling == whole
    assert given(sampling=whole, seed=4).sampling == dataclasses.replace(whole, seed=4)


def test_a_seed_holds_for_each_text_and_a_call_wins(given: Any) -> None:
    model = given(seed=11, sampling={"temperature": 1.5})
    one, two = (model.generate("def", max_tokens=12) for _ in range(2))
    assert one.finish() == two.finish()
    assert one._request.sampler.seed == 11
    assert model.generate("def", seed=12, max_tokens=1)._request.sampler.seed == 12
    own = model.generate("def", sampling=treadle.Sampling(temperature=0), max_tokens=1)
    assert own._request.sampler.settings.seed is None


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"chat_template": "chatm"}, TemplateError, "did you mean 'chatml'"),
        ({"chat_template": "{% if %}"}, TemplateError, "chat_template: chat template, line 1"),
        ({"chat_template": 3}, TemplateError, "expected a file or a name"),
        ({"chat_template_kwargs": [1]}, TreadleError, "chat_template_kwargs is list"),
        ({"chat_template_kwargs": {"messages": []}}, TreadleError, "is set by treadle"),
        ({"chat_template_kwargs": {"a": object()}}, TemplateError, "JSON types"),
        ({"reasoning": "yes"}, TreadleError, "reasoning='yes': expected auto, on, off"),
        ({"reasoning": None}, TreadleError, "reasoning=None"),
        ({"sampling": 3}, SamplingError, "expected a treadle.Sampling or a dict"),
        ({"sampling": {"tempeature": 1}}, TypeError, "did you mean 'temperature'"),
        ({"sampling": {"top_p": 2}}, SamplingError, "top_p"),
        ({"seed": "x"}, SamplingError, "seed"),
        ({"seed": 1, "sampling": {"seed": 2}}, TreadleError, "seed=1, but sampling has seed 2"),
    ],
)
def test_wrong_values(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        treadle.load(Path("not opened"), **settings)
    assert message in str(caught.value)


def test_nothing_given_changes_nothing() -> None:
    assert read_defaults() == Defaults()
    assert read_defaults().sampling_over(treadle.Sampling(top_k=3)) == treadle.Sampling(top_k=3)


def test_reasoning_off_by_a_variable(given: Any) -> None:
    model = given(chat_template=SWITCHED, reasoning="off")
    assert model.chat_prompt(HELLO) == "<user>hi<assistant><off>"
    answer = model.chat(HELLO, max_tokens=2, temperature=0)
    prompt = model.detokenize(answer.prompt_ids, special=True)
    assert prompt.endswith("<assistant><off>")
    on = model.chat(HELLO, max_tokens=2, reasoning="on")
    assert model.detokenize(on.prompt_ids, special=True).endswith("<assistant>")
    said = model.chat(HELLO, max_tokens=2, enable_thinking=True)
    assert said.prompt_ids == on.prompt_ids
    assert not isinstance(said, Reply)
    model = given(chat_template=SWITCHED)
    off = model.chat(HELLO, max_tokens=2, reasoning="off")
    assert off.prompt_ids == answer.prompt_ids


def test_reasoning_off_by_a_budget(given: Any) -> None:
    """Where the template has no variable for it: the closing mark comes first."""
    model = given(chat_template=OPENED, reasoning="off")
    answer = model.chat(HELLO, max_tokens=12, temperature=0)
    answer.finish()
    assert isinstance(answer, Reply)
    assert model.detokenize(answer.ids, special=True).startswith("</think>")
    assert (answer.reasoning, "<think>" in answer.text) == ("", False)
    for call in ({"reasoning": "on"}, {"reasoning_budget": 3}, {"enable_thinking": True}):
        template = {"template": call} if "enable_thinking" in call else call
        answer = model.chat(HELLO, max_tokens=12, temperature=0, **template)
        answer.finish()
        assert not model.detokenize(answer.ids, special=True).startswith("</think>"), call


@pytest.mark.parametrize("rule", [{"regex": "[ab]{2}"}, {"grammar": 'root ::= "ab"'}])
def test_reasoning_off_beside_a_rule(given: Any, rule: dict[str, Any]) -> None:
    """A rule holds from the first token on."""
    answer = given(chat_template=SWITCHED, reasoning="off").chat(HELLO, max_tokens=9, **rule)
    assert len(answer.finish()) == 2


def test_reasoning_off_with_tools(given: Any) -> None:
    model = given(chat_template=OPENED, reasoning="off")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = model.chat(HELLO, tools=[tool], tool_choice="required", parallel=False, max_tokens=60)
    answer.finish()
    assert ([call.name for call in answer.calls], answer.reasoning) == (["f"], "")
    with pytest.raises(TreadleError, match="expected auto, on, off"):
        model.chat(HELLO, reasoning="maybe")


def test_a_limit_of_tokens(one_kernel_cache: Path) -> None:
    with treadle.load(threads=1, context=64, max_tokens=3) as model:
        for given, reason, n in ((None, "length", 3), (5, "length", 5), (-1, "context", None)):
            made = model.generate("def f(", max_tokens=given, ignore_eos=True)
            made.finish()
            assert made.finish_reason == reason
            assert n is None or len(made.ids) == n
    with pytest.raises(TreadleError, match="max_tokens=0"):
        treadle.load(max_tokens=0)


# -- budgets, their end, history ------------------------------------------------------------------


@pytest.fixture
def limited(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the model other defaults, its budget among them."""

    def give(**settings: Any) -> treadle.Model:
        defaults = read_defaults(**settings)
        template = defaults.load_template(model.gguf, model.config.arch.name)
        monkeypatch.setitem(vars(model), "template", template)
        monkeypatch.setattr(model, "defaults", defaults)
        return model

    return give


LONG: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def n_thought(answer: Any) -> int:
    """Tokens of reasoning, about: the text is tokenized again."""
    answer.finish()
    assert isinstance(answer, Reply)
    return len(answer._request.answer.tokenizer.encode(answer.reasoning, bos=False))


def test_a_budget_for_all_answers(limited: Any) -> None:
    model = limited(chat_template=OPENED, reasoning_budget=5, reasoning_budget_message=" Enough.")
    answer = model.chat(HELLO, **LONG)
    assert n_thought(answer) < 12
    assert answer.reasoning.endswith(" Enough.")
    assert answer.text
    assert n_thought(model.chat(HELLO, reasoning_budget=12, **LONG)) > 12
    assert model.chat(HELLO, reasoning_budget=-1, **LONG).finish() == ""
    own = model.chat(HELLO, reasoning_budget_message="So.", reasoning_budget=3, **LONG)
    own.finish()
    assert own.reasoning.endswith("So.")
    assert n_thought(model.chat(HELLO, reasoning="off", **LONG)) == 0
    grammar = model.chat(HELLO, grammar='root ::= "ab"', **LONG)
    assert not isinstance(grammar, Reply)  # a rule holds from the first token on
    plain = limited(chat_template=TURNS, reasoning_budget=5).chat(HELLO, **LONG)
    assert not isinstance(plain, Reply)  # nothing reasons


def test_no_budget_is_off_and_a_call_wins(limited: Any) -> None:
    model = limited(chat_template=OPENED, reasoning_budget=0)
    assert model.template.default_reasoning == "off"
    assert n_thought(model.chat(HELLO, **LONG)) == 0
    assert not isinstance(model.chat(HELLO, reasoning="on", **LONG), Reply)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"reasoning_budget": -2}, TreadleError, "reasoning_budget=-2: expected tokens"),
        ({"reasoning_budget": 2.5}, TreadleError, "reasoning_budget"),
        ({"reasoning_budget": 0, "reasoning": "on"}, TreadleError, "exclude each other"),
        ({"reasoning_budget_message": 3}, TreadleError, "reasoning_budget_message is int"),
        ({"reasoning_preserve": "yes"}, TreadleError, "reasoning_preserve"),
    ],
)
def test_wrong_budgets(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        treadle.load(Path("not opened"), **settings)
    assert message in str(caught.value)


def test_what_the_template_makes_wrong_is_told_by_load(tmp_path: Path) -> None:
    given: dict[str, Any] = {"threads": 1, "context": 64}
    with pytest.raises(TreadleError, match="without marks of reasoning") as caught:
        treadle.load(**given, chat_template=OPENED, reasoning_budget_message="</think>")
    assert caught.value.setting == "reasoning_budget_message"
    with pytest.raises(
        TemplateError, match=r"no template: expected a file or a built-in"
    ) as caught:
        treadle.load(**given, chat_template="tool_use")
    assert caught.value.setting == "chat_template"
    with pytest.raises(TemplateError, match="line 1: never"):
        treadle.load(**given, chat_template="{{ raise_exception('never') }}")
    with treadle.load(**given, chat_template="phi3") as model:
        assert model.template.builtin == "phi3"


def test_an_answer_is_told_to_end_its_reasoning(limited: Any) -> None:
    """By whoever reads its parts, or another thread."""
    model = limited(chat_template=OPENED, reasoning_budget_message="Well.")
    answer = model.chat(HELLO, reasoning_budget=-1, **LONG)
    kinds = []
    for part in answer.parts():
        kinds.append(part.kind)
        if len(kinds) == 3:
            assert answer.end_reasoning()
    assert answer.reasoning.endswith("Well.")
    assert n_thought(answer) < 20
    assert answer.text
    assert kinds == sorted(kinds, reverse=True)  # reasoning, then content
    assert set(kinds) == {"reasoning", "content"}
    assert not answer.end_reasoning()


def test_parts_are_the_whole_answer(limited: Any) -> None:
    model = limited(chat_template=OPENED)
    answers = [model.chat(HELLO, reasoning_budget=6, seed=3, **LONG) for _ in range(2)]
    parts = list(answers[0].parts())
    content = "".join(answers[1])
    assert "".join(part.text for part in parts if part.kind == "content") == content
    assert content == answers[0].text == answers[1].text
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    assert reasoning == answers[0].reasoning == answers[1].reasoning


def test_reasoning_goes_on(limited: Any) -> None:
    model = limited(chat_template=OPENED)
    begun = {"role": "assistant", "content": "", "reasoning_content": "First I look"}
    answer = model.chat([*HELLO, begun], continue_final_message="reasoning_content", **LONG)
    prompt = model.detokenize(answer.prompt_ids, special=True)
    assert prompt.endswith("<assistant><think>\nFirst I look")
    answer.finish()
    assert answer.reasoning
    closed = model.chat([*HELLO, begun], continue_final_message=True, **LONG)
    assert "</think>" in model.detokenize(closed.prompt_ids, special=True)
    complete = model.chat([*HELLO, begun], continue_final_message=False, **LONG)
    prompt = model.detokenize(complete.prompt_ids, special=True)
    assert prompt.endswith("<assistant><assistant><think>\n")
    for talk in (HELLO, [*HELLO, {**begun, "content": "so"}]):
        with pytest.raises(TreadleError, match="no reasoning to continue"):
            model.chat(talk, continue_final_message="reasoning_content")
    with pytest.raises(TreadleError, match="continue_final_message"):
        model.chat(HELLO, continue_final_message="content?")


def test_reasoning_of_earlier_answers_stays(given: Any) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if keep_past_thinking and m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}<assistant>"
    )
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    talk = [*HELLO, said, {"role": "user", "content": "why?"}]
    kept = "<user>hi<assistant><think>hm</think>yes<user>why?<assistant>"
    left = kept.replace("<think>hm</think>", "")
    for preserve, expected in ((None, left), (True, kept), (False, left)):
        model = given(chat_template=source, reasoning_preserve=preserve)
        assert model.chat_prompt(talk) == expected
        assert model.chat_prompt(talk, keep_past_thinking=not preserve) == (
            left if preserve else kept
        )
        llama_cpp = {"preserve_reasoning": not preserve}
        assert model.chat_prompt(talk, template=llama_cpp) == (left if preserve else kept)
