"""Conversion of checkpoints to GGUF. Other formats are opened in place here as well.

::

    open.py                    open_model: any model, for the engine
    detect.py                  open_source: any checkpoint, for a converter
    sources/                   Source, the interface of checkpoint readers; derived tensors
    hf/                        Hugging Face folders
    legacy/                    GGML, GGMF, GGJT, GGUF 1, llama2.c, Meta's releases
    quantized/                 quantised safetensors: fp8, GPTQ, AWQ, bitsandbytes, MLX ..
    whisper/                   Whisper models of any file format
    lora/                      LoRA adapters
    recipe.py                  the output's types, files and offsets, before data is read
    writer.py                  writes the output, tensor by tensor
    partial_file.py            the part file and the journal of a resumable conversion
    page_cache.py              drops pages that only the conversion needed
    llamacpp_differences.py    keys that llama.cpp reads differently, as notes for the user
"""
