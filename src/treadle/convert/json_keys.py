"""Reading the JSON of a model's configuration: typed, ranged, and named when it is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from treadle.errors import FileError, UnsupportedError
from treadle.models.config import SIZE_MAX

POSITION_MAX = 1 << 31


class Keys:
    """Typed, ranged reading of config.json; an error names the key in full.

    null is what transformers writes for "not set": the default holds then.
    """

    def __init__(
        self, values: Mapping[str, Any], path: Path, defaults: Mapping[str, Any], prefix: str = ""
    ) -> None:
        self.values, self.path, self.defaults, self.prefix = values, path, defaults, prefix

    def fail(self, key: str, found: str, expected: str | None = None) -> NoReturn:
        raise FileError(found, path=self.path, where=self.prefix + key, expected=expected)

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedError(f"{self.path}: {self.prefix}{key}: {why}")

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, lo: int = 1, hi: int = SIZE_MAX
    ) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not lo <= value <= hi:
            found = "is missing" if value is None else f"is {value!r:.60}"
            self.fail(key, found, f"an integer from {lo} to {hi}")
        return value

    def number(self, key: str, default: float | None = None, *, lo: float, hi: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        # NaN fails the comparison as well
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lo <= value <= hi:
            found = "is missing" if value is None else f"is {value!r:.60}"
            self.fail(key, found, f"a number from {lo:g} to {hi:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(key, f"is {value!r:.60}", "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            self.fail(key, f"is {value!r:.60}", "a string")
        return value

    def within(self, key: str) -> Keys | None:
        """The object under ``key``; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, f"is {value!r:.60}", "an object")
        return Keys(value, self.path, {}, f"{self.prefix}{key}.")
