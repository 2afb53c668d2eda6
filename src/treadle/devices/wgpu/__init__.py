"""GPUs through WebGPU: each step of a plan of the CPU's lowering as one or more WGSL shaders.

::

    device.py     Wgpu: the device; makes pipelines, and encodes and submits runs
    dispatch.py   which op has which shader
    shader.py     Shader (a WGSL text) and Dispatch (its use for a step); common WGSL functions
    memory.py     buffers, and weights that are uploaded on first use
    isa_row.py    the row of the table of instruction sets (isa/) that plans are lowered for
    weights.py    WGSL that reads weight formats
    pages.py      WGSL that reads and writes KV pages
    products.py   shaders of matrix products: gemv, gemm, gate and up
    attention.py  shaders of rope and KV store, attention, and its merge
    rows.py       shaders on rows or single values: embedding, norms, activations, sums
    top.py        shaders of the largest logits
"""
