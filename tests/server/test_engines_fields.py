"""Fields of llama.cpp's and vLLM's that are done."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.api.test_generation import Script, say
from tests.scheduler.fake_engine import EOG, Bytes
from tests.server.conftest import events
from tests.server.test_openai import CHAT, HI, post, stream
from tests.server.test_streams import texts_of
from treadle.sampling import Sampling
from treadle.server.requests.token_rules import TokenRules

TALK = [{"role": "user", "content": "x"}]
PROGRESS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/completion": {"prompt": "x"},
    CHAT: {"messages": TALK},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("path", PROGRESS)
def test_every_prompt_tells_its_progress(path: str, n: int, client: TestClient) -> None:
    """However short it is, and also where the cache has all of it: before the first token."""
    body = {**PROGRESS[path], "max_tokens": n, "ignore_eos": True, "return_progress": True}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    for _ in range(4):
        found = [each for each in stream(client, path, **body) if each != "[DONE]"]
        at = [i for i, each in enumerate(found) if "prompt_progress" in each]
        told = [found[i]["prompt_progress"] for i in at]
        assert told
        keys = ("text", "content", "delta")
        first = next(
            (i for i, each in enumerate(found) if any("".join(texts_of(each, k)) for k in keys)),
            len(found),
        )
        assert at[-1] < first
        assert all(0 <= each["processed"] <= each["total"] for each in told)
        if n:
            assert told[-1]["processed"] == told[-1]["total"] > 0
        if path == "/v1/responses":
            assert {found[i]["type"] for i in at} == {"response.in_progress"}
            assert [each["sequence_number"] for each in found] == list(range(len(found)))
        body["return_progress"] = True
    quiet = stream(client, path, **{**body, "return_progress": False})
    assert not any("prompt_progress" in each for each in quiet if each != "[DONE]")


@pytest.mark.parametrize(("interval", "pinged"), [(0.001, True), (-1, False), (0, False)])
def test_pings_come_as_the_call_wants_them(
    interval: float, pinged: bool, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = client.app.state.service  # type: ignore[attr-defined]
    step, asked = service.engine.stepper.step, list[int]()

    def slow(*given: Any) -> Any:
        if pinged and not asked:
            asked.append(1)

            time.sleep(0.2)  # a step in which pings must come, however busy the machine
        return step(*given)

    monkeypatch.setattr(service.engine.stepper, "step", slow)
    monkeypatch.setattr(
        "treadle.server.requests.http_responses.PING_S", 0.001 if not pinged else 60.0
    )
    body = {"prompt": "x", "max_tokens": 20, "stream": True, "sse_ping_interval": interval}
    answer = client.post("/v1/completions", json=body)
    assert (": ping" in answer.text) is pinged


@pytest.mark.parametrize(
    ("path", "own"), [("/v1/completions", {"prompt": "def f("}), (CHAT, {"messages": HI})]
)
def test_what_a_verbose_answer_has(path: str, own: dict[str, Any], client: TestClient) -> None:
    body: dict[str, Any] = {**own, "max_tokens": 4, "temperature": 0}
    plain = post(client, path, **body)
    assert "__verbose" not in plain
    whole = post(client, path, **body, verbose=True)["__verbose"]
    assert len(whole["tokens"]) == whole["tokens_predicted"] == 4
    assert "hi" in whole["prompt"] or "def f(" in whole["prompt"]
    assert whole["generation_settings"]["temperature"] == 0
    said = "".join(texts_of(plain["choices"], "content") + texts_of(plain["choices"], "text"))
    assert whole["content"] == said
    ends = [each for each in stream(client, path, **body, verbose=True) if "__verbose" in each]
    assert len(ends) == 1
    assert ends[0]["__verbose"]["stop_type"] == "limit"


def test_times_of_each_chunk_and_of_the_usage(client: TestClient) -> None:
    for path, own in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": HI})):
        asked = {**own, "max_tokens": 5, "ignore_eos": True, "timings_per_token": True}
        asked["stream_options"] = {"include_usage": True}
        found = [each for each in stream(client, path, **asked) if each != "[DONE]"]
        last = found.pop()
        assert (last["choices"], last["timings"]["predicted_n"]) == ([], 5)
        told = [each for each in found if each["choices"][0].get("delta", {}).get("role") is None]
        assert told
        assert all(each["timings"]["predicted_n"] <= 5 for each in told)
    body: dict[str, Any] = {"input": "x", "max_output_tokens": 5, "ignore_eos": True}
    for each_delta in (True, False):
        found = stream(client, "/v1/responses", **body, timings_per_token=each_delta)
        deltas = [each for each in found if each["type"] == "response.output_text.delta"]
        assert found[-1]["timings"]["predicted_n"] == 5
        assert deltas
        assert all(("timings" in each) == each_delta for each in deltas)
    assert post(client, "/v1/responses", **body)["timings"]["predicted_n"] == 5


THINKS = 'root ::= "<think>\\nso be it</think>\\n\\nyes"'


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_where_reasoning_goes(streamed: bool, agent: TestClient) -> None:
    def ask(**more: Any) -> tuple[str, str, list[str]]:
        body = {"messages": HI, "grammar": THINKS, "stream": streamed, **more}
        text = agent.post(CHAT, json=body).text
        found = events(text)[:-1] if streamed else [json.loads(text)]
        warnings = [said for each in found for said in each.get("warnings", [])]
        both = ("".join(texts_of(found, key)) for key in ("reasoning_content", "content"))
        return *both, warnings  # type: ignore[return-value]

    apart: tuple[str, str, list[str]] = ("so be it", "yes", [])
    thought, said, told = ask()
    assert (thought.strip(), said.strip(), told) == apart
    for form in ("auto", "deepseek"):
        thought, said, told = ask(reasoning_format=form)
        assert (thought.strip(), said.strip(), told) == apart
    assert ask(reasoning_format="none") == ("", "<think>\nso be it</think>\n\nyes", [])
    thought, said, told = ask(reasoning_format="deepseek-legacy")
    assert (thought.strip(), said.strip(), len(told)) == ("so be it", "yes", 1)
    assert "deepseek-legacy" in told[0]
    thought, said, _ = ask(include_reasoning=False)
    assert (thought, said.strip()) == ("", "yes")
    answer = agent.post(CHAT, json={"messages": HI, "reasoning_format": "odd"})
    assert answer.json()["error"]["param"] == "reasoning_format"


@pytest.mark.slow
def test_log_probabilities_by_llama_cpps_names(client: TestClient) -> None:
    for path, own in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": HI})):
        (choice,) = post(client, path, **own, max_tokens=2, n_probs=3)["choices"]
        logprobs = choice["logprobs"]
        tops = logprobs.get("top_logprobs") or [
            each["top_logprobs"] for each in logprobs["content"]
        ]
        assert [len(top) for top in tops] == [3, 3]
        (none,) = post(client, path, **own, max_tokens=2, n_probs=0)["choices"]
        assert none["logprobs"] is None
        assert len(post(client, path, **own, max_tokens=1, n_cmpl=3)["choices"]) == 3
    found = post(client, "/completion", prompt="x", n_predict=2, logprobs=3)
    assert [len(each["top_logprobs"]) for each in found["completion_probabilities"]] == [3, 3]
    assert "completion_probabilities" not in post(client, "/completion", prompt="x", logprobs=False)


# -- vLLM's rules about tokens --------------------------------------------------------------------


def test_a_token_that_ends_a_text(client: TestClient, model: treadle.Model) -> None:
    made = model.generate("def f(", temperature=0, max_tokens=8)
    made.finish()
    end = next(i for i, id in enumerate(made.ids) if i and id not in made.ids[:i])
    for path in ("/v1/completions", "/completion"):
        body: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "max_tokens": 8}
        found = post(client, path, **body, stop_token_ids=[made.ids[end]])
        said = found["content"] if path == "/completion" else found["choices"][0]["text"]
        assert said == model.detokenize(made.ids[:end])
        if path != "/completion":
            assert found["choices"][0]["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == end


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_stop_string_that_is_kept(n: int) -> None:
    made = Script(say("so END of")).generate(stop=["END"])
    made._answer.keeps_stop = True
    assert made.finish() == "so END"
    held = Script(say("so END of")).generate(stop=["END"[:n]])
    held._answer.keeps_stop = True
    assert (held.finish(), held.finish_reason) == ("so " + "END"[:n], "stop")


def test_a_stop_string_that_is_kept_over_http(client: TestClient) -> None:
    body: dict[str, Any] = {
        "prompt": "x",
        "grammar": 'root ::= "so END of"',
        "stop": ["END"],
        "temperature": 0,
    }
    for kept, said in ((True, "so END"), (False, "so ")):
        found = post(client, "/v1/completions", **body, include_stop_str_in_output=kept)
        assert found["choices"][0]["text"] == said
        asked = {**body, "include_stop_str_in_output": kept, "stream": True}
        chunks = events(client.post("/v1/completions", json=asked).text)[:-1]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


def test_rules_mask_what_they_forbid() -> None:
    def kept(rules: TokenRules, written: list[int]) -> list[int]:
        return np.flatnonzero(rules.mask(np.zeros(6, np.float32), written) == 0).tolist()

    assert kept(TokenRules(), [1]) == [0, 1, 2, 3, 4, 5]
    assert kept(TokenRules(allowed=(4, 1)), []) == [1, 4]
    least = TokenRules(n_least=2, ends=frozenset({0, 5}))
    assert kept(least, [3]) == [1, 2, 3, 4]
    assert kept(least, [3, 3]) == [0, 1, 2, 3, 4, 5]
    bad = TokenRules(bad=((2,), (1, 3)))
    assert kept(bad, []) == [0, 1, 3, 4, 5]
    assert kept(bad, [3, 1]) == [0, 1, 4, 5]
    assert kept(bad, [1, 0]) == [0, 1, 3, 4, 5]
    assert TokenRules().applied(Sampling(top_k=3), 5) == Sampling(top_k=3)


def test_rules_hold_for_texts(client: TestClient, model: treadle.Model) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "max_tokens": 12}
    plain = post(client, "/v1/completions", **body)["choices"][0]["text"]
    allowed = model.tokenize("xyz", bos=False)
    only = post(client, "/v1/completions", **body, allowed_token_ids=allowed)["choices"][0]["text"]
    assert only
    assert set(model.tokenize(only, bos=False)) <= set(allowed)
    word = plain.split()[0]
    for said in (word, [word]):
        other = post(client, "/v1/completions", **body, bad_words=said)["choices"][0]["text"]
        assert word not in other.split()
    grammar = 'root ::= "a"*'
    ended = post(client, "/v1/completions", **body, grammar=grammar, logit_bias=[["a", -50]])
    assert ended["choices"][0]["text"] == ""
    least = post(
        client, "/v1/completions", **body, grammar=grammar, logit_bias=[["a", -50]], min_tokens=3
    )
    assert least["usage"]["completion_tokens"] >= 3
    error = post(client, "/v1/completions", 400, **body, allowed_token_ids=[10**9])["error"]
    assert error["param"] == "allowed_token_ids"


def test_a_choice(client: TestClient) -> None:
    for own in (
        {"guided_choice": ["a.b", "(c)"]},
        {"structured_outputs": {"choice": ["a.b", "(c)"]}},
    ):
        found = post(client, "/v1/completions", prompt="x", **own)["choices"][0]
        assert (found["text"] in ("a.b", "(c)"), found["finish_reason"]) == (True, "stop")


def test_ends_are_known_without_a_vocabulary() -> None:
    made = Script([*b"ab", 7, *b"c", EOG]).generate(tokenizer=Bytes())
    made._answer.ends = frozenset({7})
    assert (made.finish(), made.finish_reason, made.ids) == ("ab", "stop", [*b"ab"])


def test_documents_are_a_variable_of_the_template(client: TestClient, agent: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "max_tokens": 1, "documents": [{"text": "spam"}]}
    (told,) = post(client, CHAT, **body)["warnings"]
    assert told.startswith("documents: ")
