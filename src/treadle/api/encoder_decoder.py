"""Encoder-decoder models in the library: opening the encoder, refusing settings of ``load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.models.config import Config


def check_encoder_settings(config: Config, **settings: Any) -> None:
    """Raise UnsupportedError if one of ``settings`` is given (not None or ()): arguments of
    ``load``, by name, that encoder-decoder models such as that of ``config`` do not have.
    """
    for name, value in settings.items():
        if value is not None and value != ():
            what = "not supported in an encoder-decoder model"
            raise UnsupportedError(f"{name}=: {what} ({config.arch.name})")


def open_encoder(engine: Engine) -> None:
    """Make the encoder of an encoder-decoder model, and set ``engine.encoder``. Raises
    UnsupportedError on a device other than this machine's CPU.
    """
    from treadle.engine.text_encoder import TextEncoder

    if not engine.device.takes_media:
        what = "encoder-decoder models run on this machine's CPU only"
        raise UnsupportedError(f"{engine.config.arch.name}: {what}")
    engine.encoder = TextEncoder(engine)
