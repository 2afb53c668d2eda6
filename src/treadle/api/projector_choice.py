"""The projector of a model: found beside it or named, opened, and said if it is missing."""

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
    """Return the projectors that may belong to a model's file, the most likely one first: a Hugging
    Face folder has its own within; a GGUF may have files beside it whose names have ``mmproj``.
    """
    if is_hf(path):
        from treadle.media.hf_projector import is_media_folder

        folder = path if path.is_dir() else path.parent
        return [path] if is_media_folder(folder) else []
    return projectors_beside(path) if path.is_file() else []


def open_model_media(
    path: Path, engine: Engine, tokenizer_of: Callable[[], Tokenizer], **settings: Any
) -> ModelMedia:
    """Open a projector for a model; ``settings`` are those of ``ModelMedia``. Its products are as
    exact as the model's keys and values: all in f32 if these are. ``tokenizer_of`` returns the
    model's tokenizer.

    Raises FileError, UnsupportedError (also for a model without a vocabulary), and TreadleError for
    one that does not fit the model.
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
    """Open the first of the projectors beside a model's file that fits it; None if there is none.
    A warning in the log says why the most likely one is not used, unless it is another model's.
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
    """Return whether a file is the text part of a model that reads pictures or sound, with no
    projector beside it.
    """
    return config.arch.pictures and not is_hf(path) and not find_projectors(path)


def say_no_projector(path: Path, config: Config) -> None:
    """Log, once per process and file, that a model's projector is missing."""
    if lacks_projector(path, config):
        _say(path)


@lru_cache
def _say(path: Path) -> None:
    getLogger("treadle").warning("%s: %s", path, NO_PROJECTOR)
