"""The kernels: specs, the functions that emit them, and their numpy twins.

::

    spec.py               Spec, Args, Grid, Frame: what a kernel is
    page_sizes.py         sizes of KV-cache pages, and of the types of keys and values
    run_state.py          RUN_STATE, and the records of the inputs and results of a run
    activation_layout.py  layouts of a product's activations (q8, q16, bf16 ...), and storing them
    activations.py        silu, gelu ... in emitted code and in numpy
    format_blocks.py      addresses, codes and scales of a weight format's blocks
    prefetch.py           prefetches of weights, for adjacent rows or separate streams
    reduce.py             reduces many vectors to one value each
    transpose.py          transposes rows of vectors in registers
    item_range.py         a kernel that calls another one with an offset to its items
    matmul/               products with weights, and the choice among them
    attention/            attention over pages, rotary positions, indexers
    elementwise/          embeddings, norms, gates, streams, the top logits
    moe/                  expert routing, gathering and combining rows
    recurrent/            Mamba, delta rules, RWKV, convolutions
    quantize/             searches for the scales of quantised blocks
"""
