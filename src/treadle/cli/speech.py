"""Speech models on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from treadle.cli.load import find_model
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer
    from treadle.cli.ui.progress import ProgressBar

# Options of ``treadle serve`` that a speech model's server has; the others are for texts.
SERVING = frozenset(
    {"models", "hosts", "port", "api_keys", "api_key_file", "ssl_cert_file", "ssl_key_file"}
    | {"api_prefix", "alias", "max_requests", "grace", "metrics", "log", "log_text"}
    | {"page", "allow_hosts", "allow_origins", "threads", "device"}
)
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


def left_out(context: click.Context) -> list[str]:
    """Return the options of ``treadle serve`` that the user has given and a speech model has no use
    for.
    """
    unset = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return [
        max(param.opts, key=len)
        for param in context.command.params
        if param.name not in SERVING and context.get_parameter_source(param.name or "") not in unset
    ]


def load_recognizer(
    path: Path, progress: ProgressBar, settings: Mapping[str, Any]
) -> SpeechRecognizer:
    """Load a speech model, and record its use. ``settings``: keyword arguments of ``treadle.load``;
    those whose names are not in LOADING are ignored.
    """
    from treadle.api.speech import load_speech
    from treadle.files.stored_entries import note_use

    given = {name: settings[name] for name in LOADING if settings.get(name) is not None}
    recognizer = load_speech(path, progress=progress, **given)
    note_use(path)
    return recognizer
