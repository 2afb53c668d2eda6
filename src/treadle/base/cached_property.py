"""``cached_property`` without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # lowercase as in functools
        """``functools.cached_property`` as of Python 3.12. Earlier versions share one lock per
        class: objects wait for each other, and a child forked meanwhile waits forever. Here two
        threads may compute a value; all get the first.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__
            self.name = ""

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            made = instance.__dict__  # takes precedence over this descriptor
            return (
                made[self.name]
                if self.name in made
                else made.setdefault(self.name, self.function(instance))
            )
