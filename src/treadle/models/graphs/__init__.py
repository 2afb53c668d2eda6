"""Graphs: one file for each way that data flows."""

from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.encoder import ENCODER
from treadle.models.structure import Graph

GRAPHS: dict[str, Graph] = {"decoder": DECODER, "encoder": ENCODER}
