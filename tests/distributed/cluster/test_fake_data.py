"""A batch file's lines by several models, on a fake of Ray Data."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.cluster.fake_ray import FakeRay
from treadle.distributed.cluster.plan import ReplicaPlan
from treadle.server.batch_file.lines import InputLine
from treadle.server.batch_file.work import OutputLine


class Backwards:
    """Answers of a model: a line's bytes backwards; a line with a space has failed."""

    made: list[Backwards]

    def __init__(self, service: Any, defaults: dict[str, Any]) -> None:
        self.service = service
        self.defaults = defaults
        self.is_ready = False
        self.made.append(self)

    async def ready(self) -> None:
        self.is_ready = True

    async def answer(self, line: InputLine) -> OutputLine:
        assert self.is_ready
        return OutputLine(line.raw[::-1], line.number, b" " in line.raw)


def test_the_order_is_kept_over_calls_and_slices(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = import_module("treadle.distributed.cluster.data")
    monkeypatch.setattr(data, "Service", lambda model, settings: (model, settings))
    monkeypatch.setattr(data, "LocalAnswers", Backwards)
    monkeypatch.setattr(data, "SLICE", 7)
    monkeypatch.setattr(data, "AT_ONCE", 3)
    monkeypatch.setattr(Backwards, "made", [], raising=False)
    monkeypatch.setattr(ReplicaPlan, "open", lambda plan: SimpleNamespace(path=plan.path))
    plan = ReplicaPlan("m.gguf", 2, load={"threads": 4})
    texts = [b"\xff\x00%d" % i + b" " * (i == 5) for i in range(10)]
    lines = (InputLine(i, raw) for i, raw in enumerate(texts, 1))
    found = list(data.answers(lines, plan, {"temperature": 0}))
    assert [each.data for each in found] == [raw[::-1] for raw in texts]
    assert [each.n_tokens for each in found] == list(range(1, 11))
    assert [each.failed for each in found] == [i == 5 for i in range(10)]
    assert [type(each.failed) for each in found] == [bool] * 10
    calls = [(each["n"], each["n_blocks"], each["batch_size"]) for each in fake_ray.data_calls]
    assert calls == [(7, 3, 3), (3, 1, 3)]
    for each in fake_ray.data_calls:
        assert (each["compute"], each["num_cpus"]) == (("pool", 2), 4)
    for one in Backwards.made:
        assert (one.service[0].path, one.defaults) == ("m.gguf", {"temperature": 0})
    assert fake_ray.data_context.execution_options.preserve_order
    assert not fake_ray.data_context.enable_progress_bars
