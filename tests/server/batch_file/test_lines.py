from __future__ import annotations

import io
import json
from typing import Any

import pytest

from treadle.errors import TreadleError
from treadle.server.batch_file import lines
from treadle.server.batch_file.lines import (
    CHAT,
    COMPLETIONS,
    InputLine,
    answered,
    failed,
    read_job,
    read_lines,
)
from treadle.server.http.api_errors import ApiError


def line(value: Any, number: int = 1) -> InputLine:
    return InputLine(number, value if isinstance(value, bytes) else json.dumps(value).encode())


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = list(read_lines(io.BytesIO(b'\xef\xbb\xbf{"a": 1}\r\n\xef\xbb\xbf{}\n')))
    assert [line.raw for line in lines] == [b'{"a": 1}', b"\xef\xbb\xbf{}"]


def test_lines_are_numbered_as_an_editor_does_and_blank_ones_left_out() -> None:
    found = list(read_lines(io.BytesIO(b'{"a": 1}\n\n  \r\n{"b": 2}\r\nlast')))
    assert [(one.number, one.raw) for one in found] == [
        (1, b'{"a": 1}'),
        (4, b'{"b": 2}'),
        (5, b"last"),
    ]


def test_a_line_too_long_is_one_line_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_MEDIA_BODY", 10)
    found = list(read_lines(io.BytesIO(b"x" * 35 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11)))
    assert [len(one.raw) for one in found] == [12, 10, 11]
    for one, status in zip(found, (413, 400, 413), strict=True):
        with pytest.raises(ApiError) as error:
            read_job(one, 10)
        assert error.value.status == status


def test_a_line_of_text_has_the_limit_of_a_body() -> None:
    long = InputLine(1, b" " * ((16 << 20) + 1))
    with pytest.raises(ApiError, match="longer than 16 MiB"):
        read_job(long)
    with pytest.raises(ApiError) as error:  # where the model reads pictures
        read_job(long, 64 << 20)
    assert error.value.status == 400


def test_an_id_is_of_the_line_and_its_place() -> None:
    ids = {InputLine(n, raw).id for n in (1, 2) for raw in (b"a", b"b")}
    assert len(ids) == 4
    assert InputLine(2, b"a").id == InputLine(2, b"a").id


def test_both_forms_are_read() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    full = read_job(line({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}))
    assert (full.url, full.body, full.custom_id, full.simple) == (CHAT, body, "a", False)
    short = read_job(line({"custom_id": "a", **body}))
    assert (short.url, short.body, short.custom_id, short.simple) == (CHAT, body, "a", True)
    assert read_job(line({"prompt": "a", "seed": 3})).body == {"prompt": "a", "seed": 3}
    assert read_job(line({"prompt": "a"})).url == COMPLETIONS


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"[1]", "expected a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "nested"),
        ({"text": "a"}, "not a request"),
        ({"custom_id": 3, "prompt": "a"}, "custom_id: expected a string"),
        ({"method": "GET", "url": CHAT, "body": {}}, "method"),
        ({"url": "/v1/files", "body": {}}, "url: '/v1/files'"),
        ({"url": CHAT, "body": "a"}, "body: expected an object"),
        ({"prompt": ["a", "b"]}, "prompt: expected a string"),
        ({"prompt": "a", "n": 2}, "n: a simple line"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"url": CHAT, "body": {"stream": True}}, "stream"),
    ],
)
def test_what_is_no_request_says_why(value: Any, says: str) -> None:
    with pytest.raises(ApiError) as error:
        read_job(line(value))
    assert says in error.value.message


def test_answers_have_the_form_of_their_requests() -> None:
    body = {
        "id": "cmpl-1",
        "choices": [{"text": "b", "index": 0, "finish_reason": "stop"}],
        "usage": {"total_tokens": 2},
    }
    full = line({"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": "a"}})
    assert json.loads(answered(full, read_job(full), body)) == {
        "id": full.id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": body},
        "error": None,
    }
    simple = line({"prompt": "a"})
    assert json.loads(answered(simple, read_job(simple), body)) == {
        "id": simple.id,
        "custom_id": None,
        "text": "b",
        "finish_reason": "stop",
        "usage": {"total_tokens": 2},
    }


def test_log_probabilities_are_told_where_they_were_asked_for() -> None:
    told = {"tokens": ["b"], "token_logprobs": [-1.0], "top_logprobs": [{}], "text_offset": [0]}
    choice = {"text": "b", "index": 0, "finish_reason": "stop", "logprobs": told}
    simple = line({"prompt": "a", "logprobs": 2})
    body = {"choices": [choice], "usage": {}}
    assert json.loads(answered(simple, read_job(simple), body))["logprobs"] == told
    body = {"choices": [{**choice, "logprobs": None}], "usage": {}}
    assert "logprobs" not in json.loads(answered(simple, read_job(simple), body))


def test_errors_have_the_form_of_their_requests() -> None:
    problem = ApiError(400, "no")
    full = line({"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": "a"}})
    found = json.loads(failed(full, read_job(full), problem))
    assert (found["response"]["status_code"], found["error"]) == (400, None)
    assert found["response"]["body"] == problem.as_dict()
    simple = line({"prompt": "a"})
    found = json.loads(failed(simple, read_job(simple), problem))
    assert found == {"id": simple.id, "custom_id": None, **problem.as_dict()}
    unread = line({"custom_id": "a", "url": "/v1/files"})
    found = json.loads(failed(unread, None, problem))
    assert found == {"id": unread.id, "custom_id": "a", "response": None, **problem.as_dict()}
    assert json.loads(failed(line(b"{"), None, problem))["custom_id"] is None


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ENDLESS", 100)
    monkeypatch.setattr(lines, "MAX_MEDIA_BODY", 10)
    source = read_lines(io.BytesIO(b"x" * 90 + b"\n" + b"y" * 200))
    assert next(source).number == 1
    with pytest.raises(TreadleError, match="line 2 has more than 100 bytes"):
        next(source)
