"""Attention over pages of keys and values, rotary positions, latent and sparse attention.

::

    page_layout.py      layout of a KV-cache page; the formats of keys and values
    rope.py             RopeStore: q/k norms, rotary positions, storing keys and values
    hadamard.py         Hadamard rotation of heads, for KV formats of 4 and 5 bits
    paged.py            Attention: the kernel's spec and numpy twin; chooses the tile class
    work_item.py        Queries (common spec fields) and AttentionItem, the base of the tiles
    vector_tile.py      tile of few query rows, in vector registers (decoding)
    wide.py             base of the tiles of many query rows (prefill)
    int16_tile.py       wide tile with 16-bit products, in vectors
    matrix_tile.py      wide tile with bf16 products, on matrix registers
    latent_tile.py      vector tile over latent rows, whose values are their keys' first dims
    latent_steps.py     latent attention: pack the heads of a product, store the latent row
    merge_splits.py     Merge: joins the partial results of a history that was split
    relative_bias.py    T5's biases of scores, by head and bucket of distances
    relative_logits.py  biases of scores that each query makes for itself, by distance
    indexer.py          sparse attention: scores of cached keys, and the choice among them
    index_tile.py       vector tile that computes the indexer's scores
    row_pages.py        pages whose rows are key and value of all heads (DeepSeek V4)
    row_attention.py    attention to these rows, and the choice among them
    weights_ref.py      attention weights in numpy, which the kernels do not keep
"""
