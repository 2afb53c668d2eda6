"""``cached_property`` without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # as functools spells it
        """``functools.cached_property`` as it is from Python 3.12 on. Before, objects of a class
        share a lock: whoever asks one waits for another one's, and a child that was forked
        meanwhile waits for ever. Two threads may compute a value; all get the first.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function, self.__doc__ = function, function.__doc__
            self.name = ""

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            made = instance.__dict__  # looked at before this descriptor
            return (
                made[self.name]
                if self.name in made
                else made.setdefault(self.name, self.function(instance))
            )
