"""Older checkpoint formats.

::

    ggml.py        llama.cpp's before GGUF 2: GGML, GGMF, GGJT, GGUF 1
    llama2c.py     llama2.c's
    meta_llama.py  Meta's releases of Llama
"""
