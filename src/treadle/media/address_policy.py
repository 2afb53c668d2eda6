"""Rules for fetching pictures and sounds from http(s) addresses; ``addresses`` applies them."""

from __future__ import annotations

import re

from treadle.base.fast_classes import dataclass
from treadle.base.validate import positive, ranged


@dataclass(frozen=True)
class AddressPolicy:
    """Rules for fetching pictures and sounds from http(s) addresses. By default nothing is
    fetched.
    """

    enabled: bool = False
    """Whether anything is fetched."""
    hosts: tuple[str, ...] = ()
    """Hosts that may be fetched from; ``.example.com`` stands for all hosts below it. Empty: any
    public host."""
    max_bytes: int = 10_000_000
    """Size of an answer."""
    max_seconds: int = 10
    """Time from the name's resolution to the answer's last byte, with all redirects."""
    max_redirects: int = 3
    """Redirects that are followed."""

    def __post_init__(self) -> None:
        positive("max_bytes", self.max_bytes)
        positive("max_seconds", self.max_seconds)
        ranged("max_redirects", self.max_redirects, 0)

    def allows(self, host: str) -> bool:
        """Return whether ``hosts`` permits a host (in lower case): it is listed, it is below a
        listed domain such as ``.example.com``, or nothing is listed.
        """
        return not self.hosts or any(
            host.endswith(known) if known.startswith(".") else host == known
            for known in map(str.lower, self.hosts)
        )


def is_address(text: str) -> bool:
    """Whether a text begins with ``http://`` or ``https://``, in any case."""
    return re.match(r"https?://", text, re.IGNORECASE) is not None
