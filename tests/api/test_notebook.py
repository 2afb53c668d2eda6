"""What a notebook shows of an answer: while it is written, and when it is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import count, pairwise
from math import exp, log
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from treadle.api.notebook import (
    STRONGEST,
    Bundle,
    answer_html,
    follow,
    tokens_html,
    whole_characters,
)
from treadle.chat.template.template import ChatTemplate
from treadle.sampling.logprobs import Logprob, TokenLogprob

TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(one_kernel_cache: Any) -> Iterator[treadle.Model]:
    with treadle.load(threads=2, context=512, deterministic=True) as model:
        model.__dict__["template"] = ChatTemplate(HERMES_TEMPLATE)
        yield model


class Elements(HTMLParser):
    """The elements of a page in order, each with its attributes and own text. No tag is left open,
    and none is closed that was not opened.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str], str]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(len(self.found))
        self.found.append((tag, {name: value or "" for name, value in attrs}, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        tag, attrs, text = self.found[self._open[-1]]
        self.found[self._open[-1]] = (tag, attrs, text + data)

    def named(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


def entry(text: bytes, p: float, *others: tuple[str, float]) -> TokenLogprob:
    top = tuple(Logprob(7 + i, token, b"", log(q)) for i, (token, q) in enumerate(others))
    return TokenLogprob(1, text.decode("utf-8", "replace"), text, log(p), top)


def test_an_answer_grows_in_one_display(model: treadle.Model) -> None:
    """An update for each piece where the clock allows; the last one is the whole answer."""
    made = model.generate("import ", max_tokens=6, temperature=0)
    shown: list[Bundle] = []
    follow(made, shown.append, clock=map(float, count()).__next__)
    texts = [each["text/plain"] for each in shown]
    assert len(texts) >= 4
    assert texts[-2:] == [made.text, made.text]
    assert all(a != b and b.startswith(a) for a, b in pairwise(texts[:-1]))
    assert made.finish_reason == "length"
    assert shown[-1]["text/html"] == made._repr_html_()
    divs = [text for _, text in Elements(made._repr_html_()).named("div")]
    assert divs[1] == made.text
    assert divs[2].startswith("6 tokens, ended by: length, ")

    rare: list[Bundle] = []
    again = model.generate("import ", max_tokens=6, temperature=0)
    follow(again, rare.append, clock=lambda: 0.0)  # no time passes: the end alone
    assert [each["text/plain"] for each in rare] == [made.text]


def test_what_a_model_writes_is_no_html(model: treadle.Model) -> None:
    made = model.generate("a", max_tokens=1)
    made.finish()
    made.text = "<script>alert('x')</script> & <b>"
    page = Elements(answer_html(made))
    assert page.named("script") == page.named("b") == []
    assert page.named("div")[1][1] == made.text
    spans = Elements(tokens_html([entry(b"\"'<i>", 0.5, ("'\">\n<i>", 0.5))])).named("span")
    assert [text for _, text in spans] == ["\"'<i>"]
    assert spans[0][0].keys() == {"style", "title"}
    assert repr("'\">\n<i>") in spans[0][0]["title"]


def test_an_error_ends_the_display_with_what_was_written(model: treadle.Model) -> None:
    def broken(logits: Any, ids: list[int]) -> Any:
        if len(ids) == len(made.prompt_ids) + 2:
            raise ZeroDivisionError
        return logits

    made = model.generate("import ", max_tokens=6, custom=broken)
    shown: list[Bundle] = []
    with pytest.raises(ZeroDivisionError):
        follow(made, shown.append, clock=lambda: 0.0)
    assert [each["text/plain"] for each in shown] == [made.text]
    assert len(made.ids) == 2


def test_tokens_are_coloured_by_their_surprise() -> None:
    entries = [entry(b"sure", 1.0), entry(b" half", 0.5), entry(b" never", 1e-9)]
    spans = Elements(tokens_html(entries)).named("span")
    alphas = [float(attrs["style"].rpartition(",")[2].strip(")")) for attrs, _ in spans]
    assert alphas[0] == 0
    assert alphas[1] == pytest.approx(STRONGEST * log(2) / 5, abs=0.005)
    assert alphas[2] == STRONGEST
    assert "".join(text for _, text in spans) == "sure half never"


def test_the_pointer_shows_alternatives() -> None:
    (span,) = Elements(tokens_html([entry(b" a", 0.25, (" the", 0.5), (" a", 0.25))])).named("span")
    assert span[0]["title"].splitlines() == [
        "   50.0 %  ' the'",
        "   25.0 %  ' a'",
        "▸  25.0 %  ' a'",
    ]
    top = Logprob(1, " a", b" a", log(0.75))
    chosen = TokenLogprob(1, " a", b" a", log(0.75), (top,))
    (span,) = Elements(tokens_html([chosen])).named("span")
    assert span[0]["title"] == "▸  75.0 %  ' a'"


def test_parts_of_a_character_stand_together() -> None:
    euro = "€".encode()
    pieces = [euro[:1], euro[1:], b"a", b"\xff", b"\xf0\x9f", b"\x98\x80"]
    entries = [entry(raw, 0.5) for raw in pieces]
    assert [len(group) for group in whole_characters(entries)] == [2, 1, 1, 2]
    spans = Elements(tokens_html(entries)).named("span")
    assert [text for _, text in spans] == ["€", "a", "\ufffd", "😀"]
    assert [len(group) for group in whole_characters(entries[:1])] == [1]  # no end comes


def test_log_probabilities_of_a_model(model: treadle.Model) -> None:
    made = model.generate("import ", max_tokens=4, logprobs=3, temperature=0)
    assert made._repr_html_().count("<span") == 0  # nothing yet
    made.finish()
    assert made.logprobs is not None
    spans = Elements(made._repr_html_()).named("span")
    assert "".join(text for _, text in spans) == made.text
    best = f"{100 * exp(made.logprobs[0].logprob):5.1f} %"
    assert spans[0][0]["title"].splitlines()[0].startswith(f"▸ {best}")


def test_a_reply_with_reasoning_and_calls(model: treadle.Model) -> None:
    def sky(place: Literal["<Oslo>", "<Rome>"]) -> str:
        """The sky of a place."""
        return place

    made = model.chat(TALK, tools=[sky], tool_choice="sky", max_tokens=100)
    shown: list[Bundle] = []
    follow(made, shown.append, clock=map(float, count()).__next__)
    assert len(shown) > 2
    ((_, call),) = Elements(shown[-1]["text/html"]).named("code")
    assert call == f"sky({made.calls[0].arguments})"
    made.reasoning = "<thinking>"
    ((_, summary),) = Elements(answer_html(made)).named("summary")
    assert summary == "reasoning"
    assert "<details>" in answer_html(made)  # closed, as the answer is over


class Handle:
    def __init__(self, shown: list[Bundle]) -> None:
        self.shown = shown

    def update(self, data: Bundle, *, raw: bool) -> None:
        assert raw
        self.shown[-1] = data


def fake_ipython(monkeypatch: pytest.MonkeyPatch, shell: object) -> list[Bundle]:
    """Modules with the two functions of IPython; return what is shown."""
    shown: list[Bundle] = []

    def show(data: Bundle, *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(data)
        return Handle(shown)

    for name, member, value in (
        ("IPython.core.getipython", "get_ipython", lambda: shell),
        ("IPython.display", "display", show),
    ):
        module = ModuleType(name)
        setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.core", ModuleType("IPython.core"))
    return shown


def test_a_notebook_and_a_terminal(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = fake_ipython(monkeypatch, SimpleNamespace(kernel=object()))
    made = model.generate("import ", max_tokens=4, temperature=0)
    made._ipython_display_()
    assert [each["text/plain"] for each in shown] == [made.text]
    assert capsys.readouterr().out == ""

    shown = fake_ipython(monkeypatch, SimpleNamespace())
    model.generate("import ", max_tokens=4, temperature=0)._ipython_display_()
    assert shown == []
    assert capsys.readouterr().out == made.text + "\n"
