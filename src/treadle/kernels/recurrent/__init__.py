"""Layers with a recurrent state: Mamba, delta rules, RWKV, convolutions, chunked scans.

::

    scan.py               Scan: base of recurrences whose heads have a matrix as state
    rules.py              update rules: Mamba-2, the gated delta rule
    kda.py                the delta rule with a decay for each channel (Kimi Delta Attention)
    wkv.py                RWKV-7: token shift, keys, recurrence, output
    mamba1.py             Mamba-1's selective scan
    chunked.py            recurrences by chunks of 32 tokens, on matrix registers
    chunk_keys.py         keys and queries of a chunk, prepared for all heads of a group
    convolution.py        short convolutions in time; base of kernels channel by channel
    block_convolution.py  short convolutions within a drafted block (DFlash 2)
    compress.py           weighted means over units of tokens (DeepSeek V4)
    gates.py              decay rates, unit-length heads, output gates
"""
