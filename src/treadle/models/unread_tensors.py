"""The warning about a file's tensors that nothing reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.files.gguf import GGUF
    from treadle.models.config import Config

N_NAMED = 4  # tensors in a warning


def warn_of_unread(gguf: GGUF, config: Config) -> None:
    """Log a warning that names the file's tensors that nothing reads (``Config.unread``), if there
    are some; once per process and file.
    """
    if config.unread:
        _warn(gguf.path, config.unread)


@lru_cache
def _warn(path: Path, names: tuple[str, ...]) -> None:
    from logging import getLogger

    more = f" and {len(names) - N_NAMED} more" if len(names) > N_NAMED else ""
    getLogger("treadle").warning(
        "%s: unused tensors: %s%s (see treadle inspect)",
        path,
        ", ".join(names[:N_NAMED]),
        more,
    )
