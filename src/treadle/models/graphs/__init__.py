"""Graphs: one file for each data flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.graphs.decoder import DECODER
from treadle.models.structure import Graph, LateConstants

if TYPE_CHECKING:
    from treadle.models.config import Config

GRAPHS = LateConstants[Graph](
    __name__,
    {"decoder": DECODER},
    late={
        "encoder": "encoder.ENCODER",
        "halves": "halves.HALVES",
        "thinned": "thinned.THINNED",
        "gemma4": "gemma4.GEMMA4",
        "assistant": "assistant.ASSISTANT",
        "eagle3": ".drafters.eagle3.EAGLE3",
        "dflash": ".drafters.dflash.DFLASH",
        "dspark_streams": ".drafters.dspark_streams.DSPARK_STREAMS",
        "llama4": "llama4.LLAMA4",
        "gemma3n": "gemma3n.GEMMA3N",
        "nextn": "nextn.NEXTN",
        "nextn_streams": "streams.nextn.NEXTN_STREAMS",
        "hyper": "streams.hyper.HYPER",
        "independent": "streams.independent.INDEPENDENT",
        "hrm": "looped.hrm.HRM",
        "talkie": "talkie.TALKIE",
        "switched": "switched.SWITCHED_GRAPH",
        "dots3": "dots.DOTS3",
        "axk2": "axk.AXK2",
        "inkling": "inkling.INKLING",
        "blocks": "blocks.BLOCKS_GRAPH",
        "compressed": "compressed.COMPRESSED_GRAPH",
        "pooled": "pooled.POOLED_GRAPH",
        "minicpm": "unsaid.MINICPM",
        "baichuan": "unsaid.BAICHUAN",
        "jais": "unsaid.JAIS",
        "qwen": "unsaid.QWEN",
        "phimoe": "unsaid.PHIMOE",
        "early": "early.EARLY",
        "grove": "grove.GROVE",
        "grok": "grok.GROK",
        "apertus": "apertus.APERTUS",
        "kimi": "kimi.KIMI",
        "kimi_k3": "kimi_k3.KIMI_K3",
        "wkv": "wkv.WKV",
        "nanbeige": "looped.nanbeige.NANBEIGE",
        "nanochat": "nanochat.NANOCHAT",
        "olmo_hybrid": "olmo_hybrid.OLMO_HYBRID",
        "tower": ".towers.tower.TOWER",
        "cross_decoder": "cross.CROSS_DECODER",
        "cross_keys": "cross.CROSS_KEYS",
        "encoder_decoder": "encoder_decoder.ENCODER_DECODER",
        "encoder_decoder_keys": "encoder_decoder.ENCODER_DECODER_KEYS",
    },
)


def main_output(config: Config) -> str:
    """Return the default output of plans: "logits", or "embedding" for models without logits."""
    writes = "logits" in GRAPHS[config.arch.graph].outputs and not config.scores
    return "logits" if writes else "embedding"
