"""Parts that the graphs with several streams of hidden states share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.models.config import Config, Hyper

N_STREAMS = "hyper_connection.count"
EPSILON = "hyper_connection.epsilon"


def hyper_of(config: Config) -> Hyper:
    """Return the sizes of the streams, which are equal in all layers and must not be None."""
    hyper = config.layers[0].hyper
    assert hyper is not None
    return hyper
