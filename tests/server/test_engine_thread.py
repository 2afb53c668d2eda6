"""The engine's thread when something goes wrong, and what is counted."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import PATIENCE_S, running, talking, until
from tests.server.test_openai import post
from tests.server.test_streams import soon
from treadle.api.engine_plans import EnginePlan, probe_plans, text_plans
from treadle.engine.engine import OUTPUTS
from treadle.errors import CompileError, FileError
from treadle.scheduler.request import Request
from treadle.server.batch_file.local import LocalAnswers
from treadle.server.protocols.metrics import exposition
from treadle.server.protocols.openai.completions import read_completion
from treadle.server.requests.service import ServerSettings, Service
from treadle.server.requests.stats import EDGES_S, Histogram

BODY: dict[str, Any] = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}


def test_a_bug_in_a_step_is_told_to_all_and_the_next_call_is_served(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(model) as service, talking(service, raise_server_exceptions=False) as client:
        step = service.engine.scheduler.step

        def breaks(*_: object, **__: object) -> None:
            monkeypatch.setattr(service.engine.scheduler, "step", step)
            raise ZeroDivisionError("a secret")

        monkeypatch.setattr(service.engine.scheduler, "step", breaks)
        broken = client.post("/v1/completions", json=BODY)
        assert broken.status_code == 500
        assert "secret" not in broken.text
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert "ZeroDivisionError" in capsys.readouterr().err  # for whoever runs the server


def test_a_file_that_shrank_ends_the_service(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise FileError("shrank", path="m.gguf")

    with running(model) as service, talking(service) as client:
        monkeypatch.setattr(model.engine, "sample", fails)
        assert post(client, "/v1/completions", 500, **BODY)["error"]["message"] == "m.gguf: shrank"
        assert client.get("/health").status_code == 500
        assert post(client, "/v1/completions", 500, **BODY)["error"]["message"].endswith("shrank")


def test_who_gives_up_waiting_for_the_plans_leaves_the_thread_alone(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = threading.Event()
    monkeypatch.setattr(model.engine, "plan_for", lambda *_: given_up.wait(PATIENCE_S))
    service = Service(model, ServerSettings(log=False))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(LocalAnswers(service, {}).ready(), 0.05))
    given_up.set()
    service.engine.warmed.result(PATIENCE_S)
    assert service.engine.state == "ok"
    service.close()


def test_plans_that_do_not_compile(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise CompileError("LLVM says no")

    monkeypatch.setattr(model.engine, "plan_for", fails)
    service = Service(model, ServerSettings(log=False))
    service.engine.start()
    with pytest.raises(CompileError, match="no"):
        service.engine.warmed.result(PATIENCE_S)
    with talking(service) as client:
        assert client.get("/health").status_code == 500
    service.close()


def test_every_plan_is_there_before_it_is_healthy(service: Service, client: TestClient) -> None:
    """So no call compiles: its time is in no answer."""
    engine = service.model.engine
    ready = set(map(id, engine._ready.values()))
    with engine.lock:
        for n_tokens in (*range(1, 40), engine.max_tokens):
            for n_outputs in range(n_tokens + 1):
                engine.plan_for(n_tokens, min(n_outputs, OUTPUTS), "logits")
    assert set(map(id, engine._ready.values())) == ready
    texts = [f"def f{i}(" for i in range(7)]
    for n in (1, 2, 3, 7):
        post(client, "/v1/completions", **{**BODY, "prompt": texts[:n]})
    assert set(map(id, service.model.engine._ready.values())) == ready


def test_a_jobs_error_is_its_callers(service: Service) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        service.engine.submit(fails).result(PATIENCE_S)
    assert service.engine.submit(lambda: 5).result(PATIENCE_S) == 5


def test_jobs_and_texts_take_turns(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job runs between two steps of a text that is being written."""
    asked = threading.Event()
    step = service.engine.stepper.step
    found: list[Any] = []

    def wait(*given: Any) -> Any:
        if any(len(output.answer.ids) == 5 for output in list(service.engine.outputs.values())):
            assert asked.wait(PATIENCE_S)
        return step(*given)

    def count() -> int:
        (output,) = service.engine.outputs.values()
        return len(output.answer.ids)

    def write() -> None:
        found.append(post(client, "/v1/completions", prompt="x", max_tokens=20, ignore_eos=True))

    monkeypatch.setattr(service.engine.stepper, "step", wait)
    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: any(len(t.answer.ids) == 5 for t in list(service.engine.outputs.values())))
    job = service.engine.submit(count)
    asked.set()
    assert 5 <= job.result(PATIENCE_S) <= 6
    writer.join(PATIENCE_S)
    assert found[0]["usage"]["completion_tokens"] == 20


@pytest.mark.slow
def test_the_library_may_be_used_beside_a_server(
    service: Service, client: TestClient, model: treadle.Model
) -> None:
    """Threads of the library step for everybody, and so does the engine's: one at a time."""
    prompts = [f"def text_{i}(" for i in range(8)]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    alone = [model.generate(prompt, **settings).finish() for prompt in prompts]
    found: dict[int, str] = {}

    def write(i: int) -> None:
        for _ in range(4):
            if i % 2:
                found[i] = model.generate(prompts[i], **settings).finish()
            else:
                made = post(client, "/v1/completions", prompt=prompts[i], **settings)
                found[i] = made["choices"][0]["text"]
            assert found[i] == alone[i]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [found[i] for i in range(8)] == alone


def test_a_service_that_was_closed_has_no_thread(model: treadle.Model) -> None:
    before = threading.active_count()
    with running(model) as service:
        held = service.engine.submit(lambda: 1)
        assert held.result(PATIENCE_S) == 1
    service.engine.stop()
    assert not service.engine._thread.is_alive()
    assert threading.active_count() <= before + 1  # a worker of the model's team may be new


# -- metrics --------------------------------------------------------------------------------------


def value(service: Service, name: str) -> float:
    """Of one line of the exposition."""
    text = "\n" + exposition(service).decode()
    _, found, rest = text.partition(f"\n{name} ")
    assert found, name
    return float(rest.split()[0])


def test_metrics_count_what_was_done(model: treadle.Model) -> None:
    model.engine.cache.forget()
    with running(model, metrics=True) as service, talking(service) as client:
        n = len(model.tokenize("def text(")) + 40
        prompt = [*model.tokenize("def text("), *[7] * 40]
        for _ in range(2):
            post(client, "/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True)
        cached = value(service, "llamacpp:prompt_tokens_cached_total")
        assert cached > 0
        model_name = '{model_name="demo"}'
        assert value(service, f"vllm:prefix_cache_hits_total{model_name}") == cached
        assert value(service, f"vllm:prompt_tokens_total{model_name}") == 2 * n
        assert value(service, "llamacpp:prompt_tokens_total") == 2 * n - cached
        assert value(service, "llamacpp:tokens_predicted_total") == 10
        assert value(service, f"vllm:generation_tokens_total{model_name}") == 10
        assert value(service, "llamacpp:n_decode_total") == 10
        assert value(service, "llamacpp:requests_processing") == 0
        assert 0 <= value(service, f"vllm:kv_cache_usage_perc{model_name}") <= 1
        label = '{finished_reason="length",model_name="demo"}'
        assert value(service, f"vllm:request_success_total{label}") == 2
        for name, count in (
            ("time_to_first_token_seconds", 2),
            ("inter_token_latency_seconds", 8),
            ("e2e_request_latency_seconds", 2),
            ("request_queue_time_seconds", 2),
            ("request_prefill_time_seconds", 2),
            ("request_decode_time_seconds", 2),
            ("iteration_tokens_total", 10),
        ):
            assert value(service, f"vllm:{name}_count{model_name}") == count
        ran = value(service, f"vllm:iteration_tokens_total_sum{model_name}")
        assert ran == 2 * n - cached + 8
        assert value(service, f"vllm:num_preemptions_total{model_name}") == 0
        text = client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain")
        post(client, "/v1/embeddings", input="def f(")
        embedded = value(service, "treadle:embedded_tokens_total")
        assert embedded == len(model.tokenize("def f("))
        assert value(service, "llamacpp:prompt_tokens_total") == 2 * n - cached + embedded
        assert value(service, f"vllm:prompt_tokens_total{model_name}") == 2 * n + embedded
        assert value(service, "llamacpp:n_tokens_max") == n + 5
        assert value(service, "llamacpp:spec_decode_num_drafts_total") == 0
        assert value(service, "process_start_time_seconds") == service.created
        assert text.headers["process-start-time-unix"] == str(service.created)


def test_metrics_count_drafts(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an answer's timings, and by place: each is right as often as the one before, or less."""
    take = Request.take

    def drafted(self: Request, rows: Any, draft: Any) -> None:
        take(self, rows, draft)
        self.answer.timings.note_draft(3, len(self.answer.ids) % 3)

    monkeypatch.setattr(Request, "take", drafted)
    with running(model, metrics=True) as service, talking(service) as client:
        body: dict[str, Any] = {"prompt": "def f(", "max_tokens": 6, "ignore_eos": True}
        for stream in (False, True):
            assert client.post("/v1/completions", json={**body, "stream": stream}).text
        told = post(client, "/v1/completions", **body)["timings"]
        assert (told["draft_n"], told["draft_n_accepted"]) == (18, 6)
        for prefix, label in (("llamacpp", ""), ("vllm", 'model_name="demo"')):
            name = f"{prefix}:spec_decode_num"
            own = f"{{{label}}}" if label else ""
            assert value(service, f"{name}_drafts_total{own}") == 18
            assert value(service, f"{name}_draft_tokens_total{own}") == 54
            assert value(service, f"{name}_accepted_tokens_total{own}") == 18
            for at, n in enumerate((12, 6)):
                place = f'{label}{"," * bool(label)}position="{at}"'
                found = value(service, f"{name}_accepted_tokens_per_pos_total{{{place}}}")
                assert found == n


def test_metrics_count_texts_as_they_are_written_and_those_given_up(model: treadle.Model) -> None:
    """So that a rate says what happens now."""
    with running(model, metrics=True) as service:

        def seen() -> list[float]:
            label = '{model_name="demo"}'
            return [
                value(service, name)
                for name in (
                    f"vllm:prompt_tokens_total{label}",
                    f"vllm:generation_tokens_total{label}",
                    "llamacpp:tokens_predicted_total",
                    'vllm:request_success_total{finished_reason="abort",model_name="demo"}',
                )
            ]

        async def give_up() -> None:
            body = {"prompt": [5] * 40, "ignore_eos": True}
            stream = await service.start(read_completion, body)
            await soon(lambda: seen()[1] >= 20)
            prompt, written, predicted, aborted = seen()
            assert (prompt, aborted) == (40, 0)
            assert 20 <= written <= predicted
            assert value(service, "llamacpp:tokens_predicted_seconds_total") > 0
            stream.close()

        asyncio.run(give_up())
        until(lambda: service.engine.scheduler.idle)
        prompt, written, _, aborted = seen()
        assert (prompt, aborted) == (40, 1)
        assert 20 <= written < 472


def test_an_end_is_counted_whoever_sees_it_first(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may take the last piece, and drop the text, before the step has told of it."""
    with running(model, metrics=True) as service:
        step = service.engine.stepper.step

        def slow(*given: Any) -> Any:
            fed = step(*given)
            for request in fed[0]:
                if request.answer.done:
                    service.engine.drop(service.engine.outputs[request])
            return fed

        monkeypatch.setattr(service.engine.stepper, "step", slow)

        async def write() -> None:
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            stream = await service.start(read_completion, body)
            await soon(lambda: service.stats.ended["length"])
            stream.close()

        asyncio.run(write())
        assert service.stats.ended == {"stop": 0, "length": 1, "error": 0}
        assert service.stats.n_written == 3


def test_metrics_are_off_unless_asked_for(model: treadle.Model) -> None:
    with running(model) as service, talking(service) as client:
        assert client.get("/metrics").status_code == 501


def test_histograms() -> None:
    found = Histogram()
    for seconds in (0.0, 0.005, 0.0051, 1000.0):
        found.note(seconds)
    assert found.buckets[0] == ("0.005", 2.0)
    assert found.buckets[1] == ("0.01", 3.0)
    assert found.buckets[-2] == (str(EDGES_S[-1]), 3.0)
    assert found.buckets[-1] == ("+Inf", 4.0)
    assert found.sum == pytest.approx(1000.0101)


@pytest.mark.slow
def test_less_room_than_a_context() -> None:
    """Keys and values of so many bytes: a text that can never fit is refused, others end there."""
    with treadle.load(threads=2, context=1024, n_sequences=128, kv_bytes=1 << 20) as model:
        n = model.engine.cache.n_tokens
        assert 64 < n < 1024
        with running(model) as service, talking(service) as client:
            error = post(client, "/v1/completions", 400, prompt=[5] * (n + 1))["error"]
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (n + 1, n)
            full = post(client, "/v1/completions", prompt=[5] * (n - 9), ignore_eos=True)
            assert full["choices"][0]["finish_reason"] == "length"
            assert full["usage"]["completion_tokens"] == 9
            assert client.get("/props").json()["default_generation_settings"]["n_ctx"] == n
            prompts = [[5 + i] * (n // 3) for i in range(6)]  # and others wait for their turn
            many = post(client, "/v1/completions", prompt=prompts, max_tokens=4, ignore_eos=True)
            assert [choice["finish_reason"] for choice in many["choices"]] == ["length"] * 6


@pytest.mark.parametrize("idle", [False, True])
def test_all_plans_are_compiled_together(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Processes are forked before the thread exists; then all plans are handed to them. Behind a
    router the first plan is waited for, so the others come later.
    """
    begun: list[tuple[str, int, bool]] = []

    def compile_ahead(plan: EnginePlan, *, later: bool = False) -> bool:
        begun.append((threading.current_thread().name, plan.key.n_tokens, later))
        return True

    monkeypatch.setattr(EnginePlan, "compile_ahead", compile_ahead)
    monkeypatch.setattr(EnginePlan, "make", lambda plan: None)
    service = Service(model, ServerSettings(log=False))
    service.engine.warms_when_idle = idle
    try:
        service.engine.start()
        service.engine.warmed.result(PATIENCE_S)
    finally:
        service.close()
    own = threading.current_thread().name
    assert [entry for entry in begun if entry[0] == own] == [
        (own, plan.key.n_tokens, False) for plan in probe_plans(model)
    ]
    assert [entry[1:] for entry in begun if entry[0] != own] == [
        (plan.key.n_tokens, idle and i > 0) for i, plan in enumerate(text_plans(model))
    ]


def test_plans_are_compiled_while_nothing_is_asked(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an engine behind a router: the first one before it serves, the others when it is idle. An
    error of those is one of the model.
    """
    service = Service(model, ServerSettings(log=False))
    made: list[int] = []
    served = threading.Event()

    def plan(i: int) -> None:
        assert not i or served.wait(PATIENCE_S)
        made.append(i)
        if i == 2:
            raise CompileError("no memory")

    monkeypatch.setattr(service.engine, "_warmings", lambda: (partial(plan, i) for i in range(9)))
    service.engine.warms_when_idle = True
    try:
        service.engine.start()
        service.engine.warmed.result(PATIENCE_S)
        assert made == [0]
        served.set()
        until(lambda: service.engine.state == "error")
        assert made == [0, 1, 2]
        assert service.engine.why == "no memory"
    finally:
        service.close()
    assert "CompileError" in capsys.readouterr().err
