"""Whisper models in the files of several programs, under one set of names and keys.

::

    open.py                open_whisper: any of them
    source.py              open_whisper_source, for a converter
    file.py                WhisperFile: keys and tensors as in a GGUF file
    names.py               tensor names
    languages.py           special tokens: languages, timestamps
    vocabulary.py          merges of vocabularies that list only tokens
    safetensors_folder.py  Hugging Face folders
    ggml.py                whisper.cpp's ``ggml-*.bin``
    ctranslate2.py         CTranslate2's ``model.bin`` (faster-whisper)
"""
