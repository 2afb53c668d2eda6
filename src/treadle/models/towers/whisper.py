"""Whisper's encoder: the tower of Whisper itself, and of other models that read sound with it.

::

    x = gelu(conv1d.1 x)                 3 frames of the spectrogram; see ``STEPS``
    x = gelu(conv1d.2 x)                 every second one: two frames are one row
    x = x + positions                    learned, given by the host
    x = layer(x)                         each; all rows see each other
    states = tail(x)

The host gathers the input rows of each convolution (im2col), so that the convolution is a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.towers.config import tower_config, tower_layer
from treadle.models.towers.stages import (
    POSITIONS,
    ActivationStage,
    AddGivenStage,
    LinearStage,
    TowerStage,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treadle.models.towers.config import TowerConfig

CONVOLUTIONS = "conv1d.1", "conv1d.2"
TAPS = 3  # of both
STEPS = 1, 2  # rows from one result to the next
GELU = "gelu_erf"


def whisper_stems(name: str, n_mels: int, n_embd: int) -> tuple[TowerConfig, ...]:
    """Return the configurations of Whisper's two convolutions, each a tower without layers.
    ``name``: for messages; ``n_mels``: mel bins of a frame; ``n_embd``: width of the states.
    """
    widths = zip(CONVOLUTIONS, (n_mels, n_embd), strict=True)
    return convolution_stems(name, {each: TAPS * width for each, width in widths})


def convolution_stems(name: str, widths: Mapping[str, int]) -> tuple[TowerConfig, ...]:
    """Return the configurations of convolutions followed by a GELU, each a tower without layers.
    ``widths``: the number of values that one result reads, by the name of the convolution's
    tensors.
    """
    return tuple(
        tower_config(
            f"{name}.{each}", n_given=width, stem=(LinearStage(each), ActivationStage(GELU))
        )
        for each, width in widths.items()
    )


def whisper_tower(
    name: str,
    *,
    n_embd: int,
    n_layer: int,
    n_head: int,
    n_ff: int,
    norm_eps: float,
    tail: tuple[TowerStage, ...],
    n_given: int = 0,
    stem: tuple[TowerStage, ...] = (),
) -> TowerConfig:
    """Return the configuration of the tower after the convolutions. For each run the host writes
    the convolutions' rows and the learned positions (``POSITIONS``).

    ``stem``: stages before positions are added, for rows of ``n_given`` values (0: ``n_embd``);
    ``tail``: stages after the layers.
    """
    layers = (tower_layer(i, n_embd=n_embd, n_head=n_head, n_ff=n_ff) for i in range(n_layer))
    return tower_config(
        name,
        n_given=n_given or n_embd,
        stem=(*stem, AddGivenStage(POSITIONS)),
        n_embd=n_embd,
        norm_eps=norm_eps,
        layers=tuple(layers),
        tail=tail,
        activation=GELU,
    )
