"""Hugging Face checkpoints: configuration, tensors and tokenizer in GGUF's terms.

::

    folder.py                 open_hf (to run in place) and open_hf_source (to convert)
    family.py                 Family: how one ``model_type`` differs from Llama
    families/                 a Family for each ``model_type``
    config.py                 config.json to GGUF's hyper-parameters
    rope.py                   its RoPE settings
    windows.py                its per-layer patterns: windows, attention
    tensor_names.py           tables of tensor names
    tensors.py                tensors mapped to GGUF's names, and checked
    row_order.py              reordering of rows
    in_memory.py              derived tensors, assembled in memory
    scalar_tensors.py         single-number tensors, which are keys in GGUF
    mlx_names.py              mlx-lm's names and layouts
    mtp.py                    layers for multi-token prediction
    drafters.py               tensors of drafters' folders
    pooling.py                sentence-transformers: pooling
    dense_modules.py          sentence-transformers: matrices after pooling
    sentence_transformers.py  sentence-transformers: prompts and maximum length
    tokenizer/                tokenizers
"""
