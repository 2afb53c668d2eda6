"""Graphs: one file for each way that data flows."""

from __future__ import annotations

from treadle.models.graphs.decoder import DECODER
from treadle.models.structure import Graph, Late

GRAPHS = Late[Graph](
    __name__,
    {"decoder": DECODER},
    late={
        "encoder": "encoder.ENCODER",
        "halves": "halves.HALVES",
        "gemma4": "gemma4.GEMMA4",
        "nextn": "nextn.NEXTN",
    },
)
