"""Records of a model on this machine: its last use, its measured speeds, its facts.

::

    TREADLE_CACHE/models/KEY.used          empty: its time is that of the last use
    TREADLE_CACHE/models/KEY.speeds.jsonl  one measurement a line, appended by ``treadle bench``
    TREADLE_CACHE/models/KEY.facts.json    what its header says

KEY is a hash of the file's path, size and modification time, so a replaced file has no records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.files.stored_entries import USED, record_path, writable_record
from treadle.jit.cache import write_whole

MOST_BYTES = 1 << 20  # of a file of records that is read
SPEEDS = ".speeds.jsonl"
FACTS = ".facts.json"
NAMES = (USED, SPEEDS, FACTS)
PROMPT = "pp"  # kinds of tests of ``treadle bench``
TEXT = "tg"


@dataclass(frozen=True)
class MeasuredSpeed:
    """One measurement of ``treadle bench``.

    test: ``pp512`` (512 prompt tokens), ``tg128`` (128 tokens of text) ..; tok_s: tokens per
        second.
    depth: tokens in the cache before; sequences: texts at once; kv: type of keys and values, None
        for the default; device: its name, None for the CPU.
    time: seconds since 1970; machine: as ``this_machine`` returns it.
    """

    test: str
    tok_s: float
    depth: int
    threads: int
    sequences: int
    kv: str | None
    device: str | None
    time: float
    machine: str


@dataclass(frozen=True)
class UsualSpeed:
    """Tokens per second of prefill (``prompt``) and decode (``text``) that ``treadle bench`` last
    measured on this machine; None for what it did not measure.
    """

    prompt: float | None = None
    text: float | None = None


@lru_cache(maxsize=1)
def this_machine() -> str:
    """Return the name under which speeds are stored: the processor's name, and the number of
    processors that this process may use.
    """
    from treadle.machine.topology import affinity, cpu_name

    return f"{cpu_name()}, {len(affinity())} processors"


def last_used(path: Path) -> float | None:
    """Return when a model was last used, in seconds since 1970; None if never."""
    found = record_path(path, USED)
    with suppress(OSError):
        return None if found is None else found.stat().st_mtime
    return None


def add_speeds(path: Path, results: Iterable[Mapping[str, Any]], kv: str | None) -> None:
    """Append the results of ``treadle bench``, as in its JSON, to the records of the model at
    ``path``. ``kv``: the type of keys and values that they were measured with, None for the
    default. Does nothing where records cannot be written.
    """
    found = writable_record(path, SPEEDS)
    machine = this_machine()
    lines = []
    for result in results:
        about = {name: result[name] for name in ("test", "tok_s", "depth", "threads", "sequences")}
        about |= {"kv": kv, "device": result["device"], "time": time.time(), "machine": machine}
        lines.append(json.dumps(about) + "\n")
    with suppress(OSError):
        if found is not None and lines:
            with found.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def speeds(path: Path) -> Iterator[MeasuredSpeed]:
    """Yield a model's measurements, the oldest first; damaged lines are skipped."""
    found = record_path(path, SPEEDS)
    try:
        text = "" if found is None else read_some(found).decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        with suppress(ValueError, TypeError):
            yield MeasuredSpeed(**json.loads(line))


def usual_speed(path: Path) -> UsualSpeed:
    """Return the last speeds on this machine's CPU of a single text that begins with an empty
    cache.
    """
    machine = this_machine()
    here = {
        speed.test[:2]: speed.tok_s
        for speed in speeds(path)
        if speed.machine == machine and speed.device is None
        if speed.depth == 0 and speed.sequences == 1
    }
    return UsualSpeed(here.get(PROMPT), here.get(TEXT))


def read_facts(path: Path, version: str) -> dict[str, Any] | None:
    """Return the stored facts of a model, the fields of ``ModelFacts`` by name; None if there are
    none of this ``version``, which the caller chooses.
    """
    found = record_path(path, FACTS)
    try:
        about = None if found is None else json.loads(read_some(found))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or about.pop("version", None) != version:
        return None
    return about


def write_facts(path: Path, version: str, facts: Mapping[str, Any]) -> None:
    """Store the facts of a model, the fields of ``ModelFacts`` by name, as those of this
    ``version``. Does nothing where records cannot be written.
    """
    found = writable_record(path, FACTS)
    with suppress(OSError):
        if found is not None:
            write_whole(found, json.dumps({"version": version, **facts}).encode())


def forget(path: Path) -> None:
    """Remove all records of a model."""
    for name in NAMES:
        found = record_path(path, name)
        with suppress(OSError):
            if found is not None:
                found.unlink(missing_ok=True)


def read_some(path: Path) -> bytes:
    """Return at most the last MOST_BYTES of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_BYTES))
        return file.read(MOST_BYTES)
