from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.errors import FileError, TreadleError
from treadle.server.batch_file.lines import InputLine
from treadle.server.batch_file.output import Output, check_apart
from treadle.server.http.http_io import encode

LINES = [InputLine(n, b"request %d" % n) for n in range(1, 6)]


def record(line: InputLine) -> bytes:
    return encode({"id": line.id, "text": "é"}) + b"\n"


def begun(path: Path, rest: bytes = b"", n: int = 2) -> str:
    path.write_bytes(b"".join(map(record, LINES[:n])) + rest)
    return str(path)


def go_on(path: str, lines: Iterator[InputLine]) -> None:
    """What every start does."""
    output = Output(path)
    try:
        output.skip(lines)
        for line in lines:
            output.append(record(line))
    finally:
        output.close()


WHOLE = b"".join(map(record, LINES))


@pytest.mark.parametrize("n_bytes", range(0, len(WHOLE) + 1, 7))
def test_wherever_a_writer_was_killed_the_whole_is_the_same(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE[:n_bytes])
    go_on(str(path), iter(LINES))
    assert path.read_bytes() == WHOLE
    go_on(str(path), iter(LINES))
    assert path.read_bytes() == WHOLE


def test_zeros_of_a_lost_disk_cache_are_cut_off(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.jsonl", bytes(100))
    go_on(path, iter(LINES))
    assert Path(path).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        (record(LINES[3]), "answers a different line"),
        (b"text\n", "answers a different line"),
        (b"[]\n", "answers a different line"),
        (
            b"".join(map(record, LINES[2:])) + record(LINES[0]),
            "does not answer any line of the input",
        ),
    ],
)
def test_a_file_of_another_job_is_left_alone(tmp_path: Path, rest: bytes, says: str) -> None:
    path = begun(tmp_path / "out.jsonl", rest)
    before = Path(path).read_bytes()
    with pytest.raises(FileError, match=says) as error:
        go_on(path, iter(LINES))
    assert "line " in str(error.value)
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("rest", [b"a note", b'{"id":1}', b'{"id":"batch_request"', b"\0 x"])
def test_a_last_line_without_an_end_is_cut_off_only_where_an_answer_began(
    tmp_path: Path, rest: bytes, n: int
) -> None:
    path = begun(tmp_path / "out.jsonl", rest, n)
    before = Path(path).read_bytes()
    with pytest.raises(FileError, match=f"line {n + 1}: is not an answer"):
        go_on(path, iter(LINES))
    assert Path(path).read_bytes() == before


def test_a_changed_request_is_another_one(tmp_path: Path) -> None:
    path = begun(tmp_path / "out.jsonl")
    with pytest.raises(FileError, match="answers a different line"):
        go_on(path, iter([InputLine(1, b"another"), *LINES[1:]]))


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "out.jsonl")
    first = Output(path)
    with pytest.raises(TreadleError, match="another treadle batch"):
        Output(path)
    first.close()
    Output(path).close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_a_disk_that_is_full_is_named() -> None:
    output = Output("/dev/full")
    with pytest.raises(OSError, match="/dev/full"):
        output.append(b"line\n")
    output.close()


def test_answers_never_go_into_the_requests(tmp_path: Path) -> None:
    path = begun(tmp_path / "in.jsonl")
    link = tmp_path / "link"
    link.symlink_to(path)
    for target in (path, str(link)):
        with pytest.raises(TreadleError, match="must not be the input file"):
            check_apart(path, target)
    check_apart(path, str(tmp_path / "other"))
    check_apart("-", "-")
