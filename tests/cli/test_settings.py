"""What ``/set`` reads and shows: the same words as the options, and back again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.settings import SETTINGS, AnswerSettings, find
from treadle.sampling.settings import Sampling


def test_every_setting_of_an_answer_can_be_set() -> None:
    sampling = {each.name for each in dataclasses.fields(Sampling)} - {"custom"}
    own = {each.name for each in dataclasses.fields(AnswerSettings)} - {
        "sampling",
        "given",
        "usual",
        "constraint",
    }
    assert set(SETTINGS) == sampling | own | {"grammar", "json_schema"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("temp", "0.2", 0.2),
        ("--top-nsigma", "1", 1.0),
        ("Top-K", "3", 3),
        ("seed", "3", 3),
        ("ignore_eos", "on", True),
        ("samplers", "top_k;temp", ("top_k", "temperature")),
        ("logit_bias", "15+1 3-inf", {15: 1.0, 3: -float("inf")}),
        ("dry_sequence_breakers", "none", ()),
        ("dry_sequence_breaker", r"x '\n'", ("x", "\n")),
        ("stop", r"'a b' '\n' none", ("a b", "\n", "none")),
        ("stop", "'none'", ("none",)),
        ("max_tokens", "7", 7),
        ("n", "7", 7),
        ("when-full", "drop", "drop"),
        ("markdown", "on", True),
    ],
)
def test_what_is_typed_is_set_and_shown_so_that_it_can_be_typed(
    name: str, text: str, value: Any
) -> None:
    settings = AnswerSettings().changed(name, text)
    setting = find(name)
    assert settings.value(setting.name) == value
    line = settings.line(setting)
    assert line.startswith("* ")
    shown = line[24:].partition("  (default ")[0]
    assert AnswerSettings().changed(name, shown) == settings
    assert settings.changed(name, "default") == AnswerSettings()


def test_nothing_is_the_default_of_some() -> None:
    settings = AnswerSettings().changed("stop", "x").changed("max_tokens", "3").changed("seed", "5")
    for name in ("stop", "max_tokens", "seed"):
        settings = settings.changed(name, "none")
    assert settings == AnswerSettings()


def test_the_table_marks_what_differs() -> None:
    table = AnswerSettings(markdown=True, sampling=Sampling(top_k=1)).table().splitlines()
    assert [line.split()[1] for line in table if line.startswith("*")] == ["top_k", "markdown"]
    assert len(table) == len(SETTINGS)
    assert "  temperature           0.8" in table
    assert "* top_k                 1  (default 40)" in table


def test_the_default_is_what_the_file_recommends() -> None:
    settings = AnswerSettings(
        usual=Sampling(top_k=7, mirostat=2), sampling=Sampling(top_k=7, mirostat=2)
    )
    assert [line for line in settings.table().splitlines() if line.startswith("*")] == []
    changed = settings.changed("top_k", "40").changed("mirostat", "none")
    assert changed.line(find("top_k")) == "* top_k                 40  (default 7)"
    assert changed.sampling == Sampling()
    assert changed.changed("top_k", "default").changed("mirostat", "default") == settings


def test_a_grammar_is_read_from_its_file(tmp_path: Path) -> None:
    grammar = tmp_path / "a.gbnf"
    schema = tmp_path / "a.json"
    grammar.write_text('root ::= "a"')
    schema.write_text("{}")
    settings = AnswerSettings().changed("grammar", str(grammar))
    assert settings.settings()["grammar"] == 'root ::= "a"'
    settings = settings.changed("json-schema", str(schema))  # one of them at a time
    assert (settings.settings()["grammar"], settings.settings()["json_schema"]) == (None, "{}")
    assert str(schema) in settings.line(find("json_schema"))
    assert settings.line(find("grammar")) == "  grammar               none"
    assert settings.changed("json_schema", "none") == AnswerSettings()
