from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli.options import OF_SAMPLING, build_sampling
from treadle.sampling.settings import Sampling

# What only a program can give.
NOT_TYPED = {"custom"}


def test_every_setting_has_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert {setting.name for setting in OF_SAMPLING} == fields - NOT_TYPED


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--temp", "0.5"], "temperature", 0.5),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-k", "7"], "top_k", 7),
        (["--top-nsigma", "-1"], "top_n_sigma", -1.0),
        (["--seed", "3"], "seed", 3),
        (["--seed", "-1"], "seed", None),
        (["--samplers", "top_k;temperature"], "samplers", ("top_k", "temperature")),
        (["--logit-bias", "15043+1", "-l", "3-inf"], "logit_bias", {15043: 1.0, 3: -float("inf")}),
        (["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b"],
         "dry_sequence_breakers", ("a", "b")),
        (["--dry-sequence-breaker", "none"], "dry_sequence_breakers", ()),
        (["--ignore-eos"], "ignore_eos", True),
        (["--mirostat", "2"], "mirostat", 2),
    ],
)  # fmt: skip
def test_options_reach_sampling(
    run: Run, model: FakeModel, gguf: str, args: list[str], field: str, value: Any
) -> None:
    assert run("run", gguf, "Once", *args).code == 0
    sampling = model.calls[-1][2]["sampling"]
    assert getattr(sampling, field) == value
    changed = dataclasses.replace(sampling, **{field: getattr(Sampling(), field)})
    assert changed == Sampling()  # and nothing else was touched


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_limit_or_none(run: Run, model: FakeModel, gguf: str, command: str) -> None:
    for words, limit in (([], None), (["-n", "-1"], None), (["--max-tokens", "7"], 7)):
        assert run(command, gguf, *words, stdin="hello\n").code == 0
        assert model.calls[-1][2]["max_tokens"] == limit
    for wrong in ("0", "-2", "x"):
        ran = run(command, gguf, "-n", wrong)
        assert ran.code == 2
        assert wrong in ran.err


@pytest.mark.parametrize("bias", ["5", "x+1", "5+y", "+1"])
def test_a_bias_that_is_none(run: Run, model: FakeModel, gguf: str, bias: str) -> None:
    ran = run("run", gguf, "Once", "--logit-bias", bias)
    assert ran.code == 2
    assert "ID+BIAS" in ran.err


def test_out_of_range_is_wrong_usage() -> None:
    with pytest.raises(click.UsageError, match="min_p"):
        build_sampling({"min_p": 2.0})
