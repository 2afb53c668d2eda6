"""Speech models on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.load import find_model
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer
    from treadle.cli.ui.progress import ProgressBar

LOADING = ("threads", "device", "isa")  # settings of ``treadle.load`` that speech models have


def speech_model_path(ref: str, progress: ProgressBar | None = None) -> Path | None:
    """Return the path of MODEL if it is a speech model, else None. ``hf:`` names are downloaded.
    Raises the errors of ``find_model``.
    """
    path = find_model(ref, progress)
    return path if is_speech_model(path) else None


def is_speech_model(path: Path) -> bool:
    """Return whether a file or folder is a speech model; False for a damaged one, whose error is
    raised when it is opened as a model.
    """
    from treadle.convert.whisper.open import is_whisper

    try:
        return is_whisper(path)
    except (TreadleError, OSError):
        return False


def load_recognizer(
    path: Path, progress: ProgressBar, settings: Mapping[str, Any]
) -> SpeechRecognizer:
    """Load a speech model, and record its use. ``settings``: keyword arguments of ``treadle.load``;
    those not in LOADING are ignored.
    """
    from treadle.api.speech import load_speech
    from treadle.catalog.records import note_use

    given = {name: settings[name] for name in LOADING if settings.get(name) is not None}
    recognizer = load_speech(path, progress=progress, **given)
    note_use(path)
    return recognizer
