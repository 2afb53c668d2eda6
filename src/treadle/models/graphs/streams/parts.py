"""Parts that the graphs with several streams of hidden states share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.models.config import Config, Hyper

N_STREAMS = "hyper_connection.count"
EPSILON = "hyper_connection.epsilon"
STREAM_PARTS = ("fn", "base", "scale")  # tensors of which a token's weights are made


def hyper_of(config: Config) -> Hyper:
    """Return the sizes of the streams, which all layers share."""
    hyper = config.layers[0].hyper
    assert hyper is not None
    return hyper
