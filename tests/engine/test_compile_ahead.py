"""Plans whose kernels other processes compile before they are needed: each is lowered once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import treadle
from tests.conftest import WriteTiny
from treadle.api.engine_plans import probe_plans, text_plans
from treadle.devices.cpu.device import Cpu
from treadle.engine.engine import CHUNK
from treadle.plan.plan import Plan


class Compilers:
    """In place of the processes: the plans that they are given, as (tokens, outputs, later)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[int, int, bool]] = []
        self.lowered: list[tuple[int, int]] = []
        self.missing = True
        lower = Cpu.plan

        def compile_ahead(cpu: Cpu, plan: Plan, *, later: bool = False) -> bool:
            self.given.append((plan.n_tokens, plan.n_outputs, later))
            return self.missing

        def plan(cpu: Cpu, *args: Any, **settings: Any) -> Plan:
            result = lower(cpu, *args, **settings)
            self.lowered.append((result.n_tokens, result.n_outputs))
            return result

        monkeypatch.setattr(Cpu, "compile_ahead", compile_ahead)
        monkeypatch.setattr(Cpu, "plan", plan)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(monkeypatch)


@pytest.fixture
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    with treadle.load(tiny("llama", "F32"), threads=2, isa="portable") as model:
        yield model


def test_a_text_follows_a_prompt_and_a_prompt_may_follow(
    model: treadle.Model, compilers: Compilers
) -> None:
    most = min(CHUNK, model.engine.max_tokens)
    model.engine.plan(3)
    assert compilers.given == [(4, 1, False), (1, 1, True)]
    model.engine.plan(1)
    assert compilers.lowered == [(4, 1), (1, 1)]  # not once more
    compilers.given.clear()
    model.engine.plan(2)
    assert compilers.given == [(2, 1, False)]  # that of a text is there
    model.engine._ready.clear()
    compilers.given.clear()
    model.engine.plan(1)
    assert compilers.given == [(1, 1, False), (most, 1, True)]


def test_nothing_is_lowered_ahead_where_nothing_is_missing(
    model: treadle.Model, compilers: Compilers
) -> None:
    compilers.missing = False
    model.engine.plan(3)
    model.engine.plan(1)
    assert compilers.lowered == [(4, 1), (1, 1)]


def test_plans_that_tell_about_all_others(model: treadle.Model) -> None:
    plans = [*text_plans(model)]
    assert len(set(plans)) == len(plans)
    first, few = probe_plans(model)
    assert first == plans[0]
    assert (first.key.n_tokens, first.key.n_outputs) == (1, 1)
    assert (few.key.n_tokens, few.key.n_outputs) == (model.engine.few[-1], 1)
    assert few in plans
