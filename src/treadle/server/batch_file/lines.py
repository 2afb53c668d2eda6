"""One line of a batch file: parsing the request, formatting its answer.

A line is OpenAI's (``custom_id``, ``method``, ``url``, ``body``) or a simple one: the fields of a
body with ``prompt`` or ``messages``, and optionally a ``custom_id``.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import mapping, text, wrong
from treadle.server.http.http_io import MAX_BODY, MAX_MEDIA_BODY, encode, parse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
ENDLESS = 1 << 30  # most bytes of a line
NAMED = "batch_req_"
HEAD = b'{"id":"%b' % NAMED.encode()  # the beginning of each answer


@dataclass(frozen=True)
class InputLine:
    """A line of the input file: ``raw``, its bytes without white space at the ends, and its
    ``number`` from 1; blank lines are counted but skipped.
    """

    number: int
    raw: bytes

    @property
    def id(self) -> str:
        """The id of the line's answer, by which a resumed job finds it: a hash of the number and
        the bytes.
        """
        digest = hashlib.sha256(b"%d\n%b" % (self.number, self.raw)).hexdigest()
        return f"{NAMED}{digest[:32]}"


@dataclass(frozen=True)
class LineJob:
    """The request of a line. ``url``: the endpoint's path; ``body``: the request's body;
    ``custom_id``: None without one. ``simple``: the line is in treadle's short form, and so is its
    answer.
    """

    url: str
    body: dict[str, Any]
    custom_id: str | None
    simple: bool


def read_lines(file: BinaryIO) -> Iterator[InputLine]:
    """Yield the lines that are not blank. A line longer than the largest allowed body is truncated,
    and so refused when it is parsed. Raises TreadleError for a line of more than ``ENDLESS`` bytes.
    """
    number = 0
    while raw := file.readline(MAX_MEDIA_BODY + 2):
        number += 1
        rest = raw
        n_bytes = len(raw)
        while rest and not rest.endswith(b"\n"):
            if n_bytes > ENDLESS:
                raise TreadleError(f"line {number} has more than {ENDLESS} bytes")
            rest = file.readline(MAX_MEDIA_BODY)
            n_bytes += len(rest)
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw  # PowerShell writes one
        if raw := raw.strip():
            yield InputLine(number, raw)


def read_job(line: InputLine, most: int = MAX_BODY) -> LineJob:
    """Parse the request of a line. Raises ApiError for a line of more than ``most`` bytes, an
    invalid one, and one that asks for a stream.
    """
    if len(line.raw) > most:
        raise ApiError(413, f"the line is longer than {most >> 20} MiB", code="too_large")
    given = parse(line.raw)
    name = given.pop("custom_id", None)
    custom_id = None if name is None else text("custom_id", name)
    if "url" in given or "body" in given:
        method = given.get("method", "POST")
        url = given.get("url")
        if method != "POST":
            raise ApiError(400, f"method: {method!r:.20}: expected POST", param="method")
        if url not in URLS:
            raise ApiError(400, f"url: {url!r:.80}: expected {', '.join(URLS)}", param="url")
        body = mapping("body", given.get("body"))
        simple = False
    elif "messages" in given or "prompt" in given:
        url = CHAT if "messages" in given else COMPLETIONS
        body = given
        simple = True
        if body.get("n") not in (None, 1):
            raise ApiError(
                400, "n: a simple line has one answer: use OpenAI's batch format", param="n"
            )
        if url == COMPLETIONS and not isinstance(body["prompt"], str):
            raise wrong(
                "prompt", body["prompt"], "a string (OpenAI's batch format supports others)"
            )
    else:
        raise ApiError(400, "not a request: expected url and body, prompt, or messages")
    if body.get("stream"):
        raise ApiError(400, "stream: not supported in batch files", param="stream")
    return LineJob(url, body, custom_id, simple)


def custom_id_of(line: InputLine) -> str | None:
    """Return the line's ``custom_id``, even if the rest of the request is invalid; None without
    one.
    """
    try:
        name = parse(line.raw).get("custom_id")
    except ApiError:
        return None
    return name if isinstance(name, str) else None


def answered(line: InputLine, job: LineJob, body: Mapping[str, Any]) -> bytes:
    """Return the output line, with its newline, for the answer to ``job``, the request of ``line``.
    ``body``: the response body.
    """
    head = {"id": line.id, "custom_id": job.custom_id}
    if job.simple:
        (choice,) = body["choices"]
        said = "message" if job.url == CHAT else "text"
        made = {**head, said: choice[said], "finish_reason": choice["finish_reason"]}
        if choice.get("logprobs") is not None:
            made["logprobs"] = choice["logprobs"]
        return _line({**made, "usage": body["usage"]})
    response = {"status_code": 200, "request_id": body.get("id", line.id), "body": body}
    return _line({**head, "response": response, "error": None})


def failed(line: InputLine, job: LineJob | None, problem: ApiError) -> bytes:
    """Return the output line for a request that ended with the error ``problem``: it was refused,
    or not even parsed (``job`` is None).
    """
    head = {"id": line.id, "custom_id": job.custom_id if job else custom_id_of(line)}
    if job is not None and not job.simple:
        response = {"status_code": problem.status, "request_id": line.id, "body": problem.as_dict()}
        return _line({**head, "response": response, "error": None})
    return _line({**head, **({} if job else {"response": None}), **problem.as_dict()})


def _line(record: Mapping[str, Any]) -> bytes:
    return encode(record) + b"\n"
