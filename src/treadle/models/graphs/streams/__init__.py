"""Graphs of layers on several streams of hidden states (hyper-connections).

::

    parts.py        keys and sizes that these graphs share
    hyper.py        Qwen 3.8 Flash Next: gated means of streams, and n-gram embeddings
    independent.py  Hunyuan 4: streams that are not mixed with each other
    manifold.py     DeepSeek V4, GLM-5.3-Flash: each token's weights mix the streams
    nextn.py        MTP layers on several streams
"""
