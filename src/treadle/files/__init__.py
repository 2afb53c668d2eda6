"""Readers and writers of model files: metadata and tensors of memory-mapped, uncopied files.

::

    gguf.py             open_gguf: a GGUF model, with all its shards
    gguf_header.py      the header of one GGUF file
    gguf_strings.py     fast search for the strings of an array
    gguf_v1.py          GGUF version 1
    gguf_writer.py      GGUFWriter
    safetensors.py      safetensors files and their index
    checkpoint.py       PyTorch's zip archives
    pickles.py          pickles, without running their code
    legacy.py           GGML, GGMF and GGJT
    llama2c.py          llama2.c's checkpoints
    bundled.py          the header of a bundle: program and model in one file
    hf_config.py        layouts of config.json: Qwen 3 ASR
    hf_drafters.py      layouts of config.json: drafters
    projector_files.py  names and places of projector files (mmproj)
    tensor.py           Tensor: shape, type, and a view of the mapped bytes
    mapping.py          memory-mapped files, and checks for changed ones
    reader.py           base classes of readers, with bounds checks
    metadata.py         MetadataReader: typed, range-checked keys; GGUF's value types, lazy arrays
    stored_header.py    headers on disk, so that later starts do not read them again
    stored_entries.py   the files that keep headers, configurations, plans and a model's last use
    splits.py           from the path that a user gives to the files of a model
    mistaken.py         descriptions of files that are not models
    target.py           checks before writing, and atomic writing
"""
