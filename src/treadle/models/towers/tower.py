"""The tower: a stem, layers whose tokens all see each other, a tail.

::

    x = stem(given rows)                 patches to states, learned positions, norms
    x = layer(x)                         each: models/layer.py
    states = tail(x)                     deep.N: the states after layer N

A projector is a tower without layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from treadle.models.ffns import FFNS
from treadle.models.graphs.decoder import halves_of
from treadle.models.layer import build_layer
from treadle.models.mixers import MIXERS
from treadle.models.structure import Graph, check_tensors
from treadle.models.towers.bounds import find_bounds
from treadle.models.towers.config import TowerConfig

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

GIVEN = "given"  # the rows that a run is given
STATES = "states"


def tower_of(config: Config) -> TowerConfig:
    """Return ``config`` as a TowerConfig, which it must be."""
    assert isinstance(config, TowerConfig)
    return config


def build(g: Ops) -> Rows:
    """Build the stem and the layers; return the states after the last layer. Declare the outputs
    ``deep.N``, the states after layer N, for the layers in ``TowerConfig.deep``.
    """
    config = tower_of(g.config)
    x = g.given(GIVEN, config.n_given)
    for stage in config.stem:
        x = stage.build(g, x)
    for i in config.stage_layers:
        x = build_layer(g, i, x, *halves_of(config.layers[i]))
        if i in config.deep:
            g.result(deep(i), x)
    return x


def deep(i: int) -> str:
    """Return the name of the output with the states after layer ``i``."""
    return f"deep.{i}"


def states(g: Ops, x: Rows) -> None:
    """Build the tail on the states ``x``, and declare its result as the output "states"."""
    for stage in tower_of(g.config).tail:
        x = stage.build(g, x)
    g.result(STATES, x)


def _read(keys: ArchMetadata, arch: Arch) -> NoReturn:
    raise AssertionError("a tower is read by its family, in media/families")


TOWER = Graph(
    build=build,
    outputs={STATES: states},
    rows=(),
    sizes=lambda config: {"one": 1, "n_embd": config.n_embd},
    sublayers=halves_of,
    read=_read,
    parts=lambda: (*MIXERS.all_constants(), *FFNS.all_constants()),
)


def checked(gguf: GGUF, config: TowerConfig) -> tuple[TowerConfig, int]:
    """Check a file's tensors against those of a tower. Return the configuration, with the file's
    optional tensors, bounds and ignored tensors, and the width of the rows after the tail.

    Raises FileError for a tensor that is missing or has another shape.
    """
    width = config.n_given
    for stage in config.stem:
        width = stage.check(gguf, width)
    if config.layers and width != config.n_embd:
        name = f"{config.stem[-1].weights[-1]}.weight" if config.stem[-1].weights else GIVEN
        tensor = gguf.tensors[name]
        raise tensor.error(f"shape {list(tensor.shape)}", f"{config.n_embd} rows")
    optional, ignored = check_tensors(gguf, TOWER, config)
    for stage in config.tail:
        width = stage.check(gguf, width)
    stages = (*config.stem, *config.tail)
    used = {f"{w}.{kind}" for s in stages for w in s.weights for kind in ("weight", "bias")}
    used |= gguf.tensors.keys() - set(ignored)
    bounds = find_bounds(gguf, used)
    ignored = tuple(name for name in ignored if name not in used and name not in bounds)
    return replace(config, optional=optional, bounds=bounds, ignored=ignored), width
