"""The path that an argument of ``load`` means (a file, a name on the hub, or a short name), and the
model there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.paths import file_name

if TYPE_CHECKING:
    from treadle.files.tensor import Progress
    from treadle.hub.fetch import ProgressCallback

HUB = "hf:"


def packaged_model() -> Path:
    """Return the path of the small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def find_path(
    given: str | os.PathLike[str] | None,
    of: str = "path",
    progress: ProgressCallback | None = None,
    *,
    projector: bool | None = False,
) -> Path:
    """Return the path of the model that ``given`` means; None means the one in the package. A text
    that is no path on this machine may be a name on the hub, ``hf:OWNER/REPO`` and longer forms,
    which is downloaded once, or the short name of a downloaded model, as ``treadle list`` shows it.
    ``of``: the argument's name, for errors; ``progress``: called during a download, None for no
    reports; ``projector``: whether a download includes the projector, as of ``hub.download``.

    Raises FileError for an invalid name and a short name that fits several models, and the errors
    of ``hub.download``. A path that does not exist is returned.
    """
    if given is None:
        return packaged_model()
    path = file_name(given, of)
    if not isinstance(given, str) or os.path.lexists(path):
        return path
    if given.startswith(HUB):
        from logging import getLogger

        from treadle.hub import download

        say = getLogger("treadle").info
        return download(given, progress=progress, say=say, projector=projector)
    from treadle.catalog.names import find_named, similar_models

    if (named := find_named(given)) is not None:
        return named.model.path
    from treadle.hub.name import check_no_address

    check_no_address(given)
    if similar := similar_models(given):
        raise FileError(f"no such file; {similar}", path=given)
    return path


def open_found(path: Path, progress: Progress | None = None, *, drafter: bool = False) -> GGUF:
    """Open the model at ``path`` as ``convert.open.open_model`` does, with its errors. A GGUF file
    needs no reader of other files.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        with suppress(FileError, UnsupportedError):
            return open_gguf(path, stored=True)
    from treadle.convert.open import open_model

    return open_model(path, progress, drafter=drafter)
