"""GPU kernels that replace steps of the CPU's lowering, most of them with a block of threads per
item.

::

    block.py           ThreadBlock: thread indices, reductions over a warp or a block
    weights.py         weights read by one thread, as floats
    tile.py            BlockTile: a tile of a matrix product, by matrix instructions
    gemm.py            matrix product for many tokens
    gated.py           gate and up products with their activation
    gemv.py            matrix product for few tokens
    attention.py       attention for few query rows, a page of keys per warp
    attention_tile.py  attention for many query rows, by matrix instructions
    merge.py           merge of the partial results of split attention
    rope.py            rotation of queries and keys, and the store of keys and values
    norm.py            norms, and packing of activations
    route.py           choice of experts, and the sort of rows by expert
    top.py             the largest logits of each row
    spread.py          the CPU's kernels for other ops, run by all threads of a block; scans

Each ``swap`` function returns a step with the GPU kernel; ``kernel_table.py`` lists them by op.
"""
