"""Graphs: one file for each data flow, with the reading of its keys into a ``Config``.

::

    decoder.py          layers on one residual stream: the base of most others
    encoder.py          bidirectional attention, no logits
    encoder_decoder.py  T5: an encoder, and a decoder that attends to its rows
    cross.py            decoders with cross attention, and the store of an encoder's keys
    nextn.py            a layer for multi-token prediction (MTP) as a model of its own
    assistant.py        Gemma 4's drafter
    looped/             layers that run several times
    streams/            layers on several streams of states (hyper-connections)

    apertus.py      Apertus: xIELU, with parameters per layer
    axk.py          A.X K2: gates after norms
    blocks.py       MiniMax M3: attention to blocks of keys
    compressed.py   DeepSeek V4: compressed keys
    dots.py         dots3-note: latent attention of two sizes
    smallthinker.py SmallThinker: the router reads a layer's input
    gemma3n.py      Gemma 3n: AltUp, LAuReL, per-layer embeddings
    gemma4.py       Gemma 4: two head widths, per-layer embeddings
    gigachat.py     GigaChat 3.5: latent attention and a delta net, gates of norms
    grok.py         Grok: experts, perhaps in parallel to a dense FFN
    grove.py        GroveMoE: small experts that neighbours share
    one_half.py     Nemotron-H: one sublayer per layer
    inkling.py      Inkling: biases by distance, short convolutions
    kimi.py         Kimi Linear, Ling 3: latent attention and recurrent states
    kimi_k3.py      Kimi K3: attention residuals
    llama4.py       Llama 4: chunked attention, query temperature
    nanochat.py     NanoChat: rope in the opposite direction
    olmo_hybrid.py  OLMo Hybrid: norms before or after sublayers
    pooled.py       GLM-5.3-Flash: latent attention to units of keys
    switched.py     Granite Switch: adapters that control tokens choose
    talkie.py       Talkie: the embeddings are added after each layer
    pruned.py       Nemotron 49B to 253B: layers without attention or FFN
    missing_keys.py MiniCPM, Baichuan, Jais, Qwen, PhiMoE: files that omit values
    wkv.py          RWKV-7

    reading.py      keys of all decoders and encoders
    kinds.py        the mixer, FFN, norm and pooling that a file shows
    positions.py    keys of attention windows, and each layer's rope table
    experts.py      keys of experts
    limits.py       keys of activations
    latent.py       keys of latent attention
    indexing.py     keys of an indexer
    recurrence.py   keys of recurrent layers
    ngrams.py       keys and tensors of n-gram embeddings
"""

from __future__ import annotations

from treadle.models.graphs.decoder import DECODER
from treadle.models.structure import Graph, LazyConstants

GRAPHS = LazyConstants[Graph](
    __name__,
    {"decoder": DECODER},
    lazy={
        "encoder": "encoder.ENCODER",
        "halves": "one_half.HALVES",
        "thinned": "pruned.THINNED",
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
        "gigachat35": "gigachat.GIGACHAT35",
        "inkling": "inkling.INKLING",
        "blocks": "blocks.BLOCKS_GRAPH",
        "compressed": "compressed.COMPRESSED_GRAPH",
        "pooled": "pooled.POOLED_GRAPH",
        "minicpm": "missing_keys.MINICPM",
        "baichuan": "missing_keys.BAICHUAN",
        "jais": "missing_keys.JAIS",
        "qwen": "missing_keys.QWEN",
        "phimoe": "missing_keys.PHIMOE",
        "early": "smallthinker.EARLY",
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
