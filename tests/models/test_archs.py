"""Rows of traits: named as they are keyed, few, and of known tensors and graphs."""

from __future__ import annotations

import dataclasses

from treadle.kernels.activations import ACTIVATIONS
from treadle.models.archs import ARCHS, Arch
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import LAYER_ROWS
from treadle.models.ignored_tensors import LEFT_OUT
from treadle.models.mixers import MIXERS


def test_rows_are_keyed_by_their_names_and_need_known_tensors() -> None:
    for name, arch in ARCHS.items():
        rows = (*GRAPHS[arch.graph].rows, *LAYER_ROWS)
        rows += MIXERS[arch.state].rows if arch.state else ()
        if arch.encoder:
            own = (*GRAPHS[ARCHS[arch.encoder].graph].rows, *LAYER_ROWS)
            rows += tuple(dataclasses.replace(row, name=f"enc.{row.name}") for row in own)
        optional = {row.name for row in rows if row.optional}
        assert name == arch.name
        assert arch.needs <= optional
        lacks = {name.removeprefix("blk.0.") for name in arch.lacks}  # some in one layer alone
        assert lacks <= {row.name for row in rows} - optional
        assert "logits" in GRAPHS[arch.graph].outputs or arch.graph == "encoder"
        assert arch.activation in ACTIVATIONS
        assert name not in LEFT_OUT
    named = ("name", "graph", "mixer", "state", "names", "nextn", "encoder")  # of files and parts
    media = ("pictures", "spans", "causal_widths", "interleaved")  # nothing for text reads these
    assert len(dataclasses.fields(Arch)) - len(named) - len(media) <= 12  # traits: about a dozen
