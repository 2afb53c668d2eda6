"""The choice of a model's projector: named, or found beside the model. If it is missing, a log
message says so.
"""

from __future__ import annotations

from functools import lru_cache
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.api.media import ModelMedia
from treadle.errors import TreadleError
from treadle.files.projector_files import named_for_another, projectors_beside
from treadle.files.splits import is_hf

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.engine.engine import Engine
    from treadle.models.config import Config
    from treadle.tokenizer.tokenizer import Tokenizer

NO_PROJECTOR = (
    "the model also reads pictures or sound, but there is no projector file beside it: put its "
    "mmproj file into the same folder, or name it (--mmproj FILE, mmproj=...)"
)


def find_projectors(path: Path) -> list[Path]:
    """Return the files that may be the projector of the model at ``path``, the most likely one
    first: a Hugging Face folder itself, if it has picture or sound parts; for a GGUF, files beside
    it with ``mmproj`` in their names.
    """
    if is_hf(path):
        from treadle.media.hf_projector import is_media_folder

        folder = path if path.is_dir() else path.parent
        return [path] if is_media_folder(folder) else []
    return projectors_beside(path) if path.is_file() else []


def open_model_media(
    path: Path, engine: Engine, tokenizer_of: Callable[[], Tokenizer], **settings: Any
) -> ModelMedia:
    """Open the projector file ``path`` for the engine's model. Products are computed in f32 if the
    model's keys and values are f32. ``tokenizer_of`` returns the model's tokenizer; ``settings``:
    keyword arguments of ``ModelMedia``.

    Raises FileError, UnsupportedError (also for a model without a vocabulary), and TreadleError for
    a projector that does not fit the model.
    """
    from treadle.media.projector import open_projector

    tokenizer = tokenizer_of()
    exact = engine.cache.kv == "f32"
    projector = open_projector(path, engine.device, exact=exact, lock=engine.lock)
    try:
        return ModelMedia(projector, engine, tokenizer, **settings)
    except BaseException:
        projector.close()
        raise


def open_found_media(
    path: Path, engine: Engine, tokenizer_of: Callable[[], Tokenizer], **settings: Any
) -> ModelMedia | None:
    """Open the first projector beside the model at ``path`` that fits it; None without one. The
    other arguments are those of ``open_model_media``. If the most likely one does not fit, a
    warning in the log says why, unless its name is another model's.
    """
    reasons = {}
    for each in find_projectors(path):
        try:
            return open_model_media(each, engine, tokenizer_of, **settings)
        except TreadleError as error:
            reasons[each] = str(error)
    for first, reason in list(reasons.items())[:1]:
        if not named_for_another(first.name, path.name):
            getLogger("treadle").warning("the model reads text only: %s", reason)
    return None


def lacks_projector(path: Path, config: Config) -> bool:
    """Return whether the model at ``path`` is a GGUF file of an architecture (``config``) that can
    read pictures or sound, and no projector is beside it.
    """
    return config.arch.pictures and not is_hf(path) and not find_projectors(path)


def say_no_projector(path: Path, config: Config) -> None:
    """Log that the projector of the model at ``path`` is missing, if ``lacks_projector`` says so;
    once for each file in a process.
    """
    if lacks_projector(path, config):
        _say(path)


@lru_cache
def _say(path: Path) -> None:
    getLogger("treadle").warning("%s: %s", path, NO_PROJECTOR)
