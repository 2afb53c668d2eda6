"""Rows of traits: named as they are keyed, few, and of known tensors and graphs."""

from __future__ import annotations

import dataclasses

from treadle.models.archs import ARCHS, Arch
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import LAYER_ROWS


def test_rows_are_keyed_by_their_names_and_need_known_tensors() -> None:
    optional = {row.name for row in LAYER_ROWS if row.optional}
    for name, arch in ARCHS.items():
        assert name == arch.name
        assert arch.needs <= optional
        assert arch.graph in GRAPHS
    assert len(dataclasses.fields(Arch)) <= 12
