"""Products with weights: gemm, gemv, their tile loops, and the choice among them.

::

    matmul.py             Matmul: fields, arguments and numpy twin of all products; segments
    select.py             the product for a format, an instruction set and a number of tokens
    select_activation.py  the activation kind for a format on an instruction set
    select_strips.py      the strip product for it, if there is one
    sizes.py              batch sizes with plans of their own
    gemv.py               gemv: a few tokens, rows read straight from the file
    gemv_q8.py            gemv's sums of bytes, for all formats with codes
    gemv_spans.py         gemv's sums of bytes, 256 values at a time (AVX2)
    gemv_int16.py         gemv's sums of 16-bit words
    gemm.py               gemm: packs a panel of rows, and multiplies it by every token
    panel.py              packing of panels
    tile_shape.py         Tiled: fields common to gemm and its tile loops
    tile.py               tile loop with dots
    tile_outer.py         tile loop with outer products (RISC-V)
    tile_pairs.py         tile loop with products of 2 x 2 (Arm i8mm)
    tile_ordered.py       tile loop with the order of addition of matrix registers
    epilogue.py           factor, bias, residual, and storing a tile's sums
    matrix.py             gemm on matrix registers, in bf16
    matrix_words.py       gemm on matrix registers, in 16-bit words as bytes
    matrix_registers.py   operands of matrix registers, for other kernels
    strips.py             StripGemm: few tokens, rows in file order
    byte_strips.py        strip products of bytes: unpacking their strips
    matrix_bytes.py       strip products of bytes, on matrix registers
    vector_bytes.py       strip products of bytes, in vectors
    vector_floats.py      strip products of floats, in vectors
    gated.py              both products of a gated activation, and the activation
    lora.py               LoRA additions to a product
    lora_experts.py       LoRA additions to the products of experts
"""
