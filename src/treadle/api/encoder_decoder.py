"""Encoder-decoder models in the library: opening the encoder, refusing settings of ``load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.models.config import Config


def check_encoder_settings(config: Config, **settings: Any) -> None:
    """Raise UnsupportedError if a setting of ``load`` that encoder-decoder models do not have is
    given.
    """
    for name, value in settings.items():
        if value is not None and value != ():
            what = "not supported in an encoder-decoder model"
            raise UnsupportedError(f"{name}=: {what} ({config.arch.name})")


def open_encoder(engine: Engine) -> None:
    """Set ``engine.encoder``. Raises UnsupportedError on a device other than this machine's CPU."""
    from treadle.engine.text_encoder import TextEncoder

    if not engine.device.takes_media:
        what = "encoder-decoder models run on this machine's CPU only"
        raise UnsupportedError(f"{engine.config.arch.name}: {what}")
    engine.encoder = TextEncoder(engine)
