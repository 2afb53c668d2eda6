"""API keys: who may call, under which name, and how much.

A file of keys has one a line, as llama.cpp's. After a key, fields may follow::

    sk-7f3a...
    sk-91bc...  name=alice  requests=4  tokens-per-minute=20000  models=chat,code
"""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, TreadleError
from treadle.server.http.api_errors import ApiError
from treadle.server.http.file_watch import FileWatch

MAX_FILE = 1 << 20  # bytes
RECHECK_S = 1.0  # seconds between two checks whether the file has changed
MINUTE_S = 60.0
RETRY_S = 2  # Retry-After where it is unknown when a request will end

# Counts tokens that the current request has read or written for its key; no-op without limits.
charge_tokens: ContextVar[Callable[[int], object]] = ContextVar(
    "charge_tokens", default=lambda n_tokens: None
)


# Header by which a router tells an engine the name of a request's key.
OWNER_HEADER = "x-treadle-owner"
ASKED_HEADER = "x-treadle-asked"  # marks the router's own requests, which are not logged
CHARGES = "/treadle/charges"  # path at which a router asks for the tokens of each key


@dataclass(frozen=True)
class ApiKey:
    """One API key and its limits; None is no limit. ``requests``: open at once.
    ``tokens_per_minute`` counts tokens of prompts and outputs, when a request ends. ``models``:
    names of the models that the key may use; empty: all.
    """

    secret: bytes
    name: str
    requests: int | None = None  # at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()

    def may_use(self, *names: str) -> bool:
        """Return whether the key may use the model that has these names (its name and aliases)."""
        return not self.models or any(name in self.models for name in names)

    def check(self, *names: str) -> None:
        """Raise ApiError (403) if the key may not use the model that has these names."""
        if not self.may_use(*names):
            raise ApiError(
                403,
                f"this API key may not use {names[0]}, but only {', '.join(self.models)}",
                param="model",
                code="model_not_allowed",
            )


def _count(text: str) -> int:
    n = int(text)
    if n < 1:
        raise ValueError
    return n


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.@-]{1,64}", text, re.ASCII):  # it stands in headers and logs
        raise ValueError
    return text


def _models(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise ValueError
    return names


_COUNT: tuple[Callable[[str], Any], str] = (_count, "a whole number from 1")
FIELDS: Mapping[str, tuple[Callable[[str], Any], str]] = {  # reader, and what it expects
    "name": (_name, "a name of letters, digits, '.', '_', '@' and '-'"),
    "requests": _COUNT,
    "requests-per-minute": _COUNT,
    "tokens-per-minute": _COUNT,
    "models": (_models, "names of models, separated by commas"),
}


def read_keys(path: Path) -> list[ApiKey]:
    """Read a file of keys: one a line, with its limits, as ``_read_line`` reads it. Raises
    FileError that names the line; no message shows a key.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE + 1)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror or error}", path=path) from error
    if len(raw) > MAX_FILE:
        raise FileError(f"larger than {MAX_FILE >> 20} MiB: this is no file of keys", path=path)
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise FileError("not UTF-8", path=path, offset=error.start) from None
    keys: list[ApiKey] = []
    seen: dict[bytes | str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _read_line(words, f"line-{number}")
            for what, mark in (("key", key.secret), ("name", key.name)):
                if mark in seen:
                    raise ValueError(f"the {what} of line {seen[mark]} stands here again")
                seen[mark] = number
        except ValueError as error:
            raise FileError(str(error), path=path, where=f"line {number}") from None
        keys.append(key)
    if not keys:
        raise FileError("there is no key in it", path=path, expected="one a line")
    return keys


def _read_line(words: list[str], name: str) -> ApiKey:
    """Return the key of a line's ``words``: the secret, then limits as FIELD=VALUE. ``name``: the
    key's name if the line gives none. Raises ValueError if the line is not of this form.
    """
    if words[0].partition("=")[0].lower().replace("_", "-") in FIELDS:
        raise ValueError("the line begins with a field: expected the key first")
    given: dict[str, Any] = {"name": name}
    for place, word in enumerate(words[1:], 2):
        field, equals, value = word.partition("=")
        field = field.lower().replace("_", "-")
        if not equals:
            raise ValueError(f"word {place} has no '=': expected KEY FIELD=VALUE ...")
        if field not in FIELDS:
            near = get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(FIELDS)}"
            raise ValueError(f"unknown field {field[:40]!r}: {hint}")
        read, expected = FIELDS[field]
        try:
            if not value:
                raise ValueError
            given[field.replace("-", "_")] = read(value)
        except ValueError:
            raise ValueError(f"{field}: expected {expected}, found {value[:40]!r}") from None
    return ApiKey(words[0].encode(), **given)


# The key of the current request, None without one.
current_key: ContextVar[ApiKey | None] = ContextVar("current_key", default=None)


class TokenCharges:
    """In an engine of a router: numbers of tokens computed, by name of the API key, until the
    router takes them.
    """

    def __init__(self) -> None:
        self._n_tokens: dict[str, int] = {}

    def add(self, owner: str, n_tokens: int) -> None:
        """Add ``n_tokens`` to the count of the key named ``owner``."""
        self._n_tokens[owner] = self._n_tokens.get(owner, 0) + n_tokens

    def take(self) -> dict[str, int]:
        """Return all counts by name of the key, and reset them."""
        taken = self._n_tokens
        self._n_tokens = {}
        return taken


class RateBucket:
    """A token bucket: it gains ``per_minute`` units each minute, holds at most as many, and starts
    full. It may be overdrawn. ``now``: seconds of any steady clock.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def wait_s(self, n: float, now: float) -> float:
        """Return the seconds from the time ``now`` until the bucket has ``n`` units; 0 if it has
        them.
        """
        self._fill(now)
        return max(n - self._left, 0.0) * MINUTE_S / self.per_minute

    def take(self, n: float, now: float) -> None:
        """Take ``n`` units at the time ``now``, even if the bucket has fewer: it is then
        overdrawn.
        """
        self._fill(now)
        self._left -= n

    def _fill(self, now: float) -> None:
        more = (now - self._at) * self.per_minute / MINUTE_S
        self._left = min(self._left + more, float(self.per_minute))
        self._at = now


class KeyUse:
    """The use of one key so far; it survives a new reading of the key file. ``number``: 0 for the
    key that was seen first, 1 for the second, and so on; requests of different numbers share the
    engine fairly.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.n_open = 0
        self._allowances: dict[str, RateBucket] = {}

    def allowance(self, what: str, per_minute: int | None, now: float) -> RateBucket | None:
        """Return the bucket for ``what``: "requests" or "tokens". It is a new, full one if the
        limit ``per_minute`` has changed; None without a limit. ``now``: seconds, as for
        ``RateBucket``.
        """
        if per_minute is None:
            return None
        found = self._allowances.get(what)
        if found is None or found.per_minute != per_minute:
            found = self._allowances[what] = RateBucket(per_minute, now)
        return found


class RequestLease:
    """One request counted as open for its key. Call ``end`` when it ends; further calls do
    nothing.
    """

    def __init__(self, use: KeyUse) -> None:
        self._use: KeyUse | None = use
        use.n_open += 1

    def end(self) -> None:
        """Take the request out of the key's count of open requests. Idempotent."""
        if self._use is not None:
            self._use.n_open -= 1
            self._use = None


class ApiKeyStore:
    """The API keys of a server: those of the command line (``options``), and those of a ``file``,
    which is read again when it changes. Without keys everyone on this machine may call. Raises
    FileError if the file cannot be used at first; if a changed file cannot be used, the former keys
    stay, and ``tell`` is called with a message. ``clock`` returns seconds.
    """

    def __init__(
        self,
        options: Iterable[str] = (),
        file: Path | None = None,
        tell: Callable[[str], object] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = [
            ApiKey(key.encode(), f"key-{number}") for number, key in enumerate(options, 1)
        ]
        self._file = file
        self._tell = tell
        self._clock = clock
        self._uses: dict[bytes, KeyUse] = {}
        self._watch = None if file is None else FileWatch(file)
        self._checked_s = clock()
        self.keys = self._all_keys()

    def _all_keys(self) -> list[ApiKey]:
        keys = [*self._options, *(read_keys(self._file) if self._file else ())]
        for key in keys:
            self._uses.setdefault(key.secret, KeyUse(len(self._uses)))
        return keys

    def refresh(self) -> None:
        """Read the file again if it has changed, at most once a second."""
        now = self._clock()
        if self._watch is None or now - self._checked_s < RECHECK_S:
            return
        self._checked_s = now
        if self._watch.has_changed():
            try:
                self.keys = self._all_keys()
            except TreadleError as error:
                self._tell(f"{error}; the former keys stay in use")

    def find(self, given: Mapping[str, str]) -> ApiKey | None:
        """Return the key in a request's headers (``authorization: Bearer KEY`` or ``x-api-key``),
        None without a valid one. ``given``: headers by names in lower case. Compares with all keys,
        each in constant time.
        """
        self.refresh()
        scheme, _, said = given.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            said = given.get("x-api-key", "")
        secret = said.strip().encode("latin-1", "replace")  # as headers are decoded
        found = [key for key in self.keys if hmac.compare_digest(secret, key.secret)]
        return found[0] if found else None

    def fairness_number(self, key: ApiKey) -> int | None:
        """Return the number of ``key`` (``KeyUse.number``), by which requests of different keys
        share the engine fairly; None if there is only one key.
        """
        return self._uses[key.secret].number if len(self.keys) > 1 else None

    def begin(self, key: ApiKey) -> RequestLease:
        """Count a request that begins, and return its lease. Raises ApiError (429), and counts
        nothing, if a limit of the key does not allow it.
        """
        use = self._uses[key.secret]
        now = self._clock()
        if key.requests is not None and use.n_open >= key.requests:
            raise _too_many(f"{key.requests} requests at once", RETRY_S)
        rate = use.allowance("requests", key.requests_per_minute, now)
        tokens = use.allowance("tokens", key.tokens_per_minute, now)
        for allowance, what in ((rate, "requests"), (tokens, "tokens")):
            if allowance is not None and (wait_s := allowance.wait_s(1, now)) > 0:
                raise _too_many(f"{allowance.per_minute} {what} per minute", wait_s)
        if rate is not None:
            rate.take(1, now)
        return RequestLease(use)

    def charge_by_name(self, charges: Mapping[str, int]) -> None:
        """Charge numbers of tokens, ``charges`` by name of the key, to several keys' tokens per
        minute.
        """
        for key in self.keys:
            if key.name in charges:
                self.charge(key, charges[key.name])

    def charge(self, key: ApiKey, n_tokens: int) -> None:
        """Charge ``n_tokens``, which a request has read and written, to the key's tokens per
        minute.
        """
        now = self._clock()
        tokens = self._uses[key.secret].allowance("tokens", key.tokens_per_minute, now)
        if tokens is not None:
            tokens.take(n_tokens, now)

    def __len__(self) -> int:
        """Return the number of keys; 0 means that no key is demanded."""
        return len(self.keys)

    def __iter__(self) -> Iterator[ApiKey]:
        """Iterate over the keys."""
        return iter(self.keys)


def _too_many(limit: str, wait_s: float) -> ApiError:
    seconds = max(math.ceil(wait_s), 1)
    return ApiError(
        429,
        f"this API key may have {limit}: retry in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )
