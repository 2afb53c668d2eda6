"""Tokenizers: text to token ids and back.

::

    tokenizer.py       Tokenizer, its loader, and StreamDecoder: ids to text, piece by piece
    vocab.py           Vocab: the checked arrays of a GGUF file, and ids with a meaning
    bpe.py             byte-level BPE (``gpt2``)
    pretokenizers.py   its families' rules that split text into words
    bpe_chars.py       character-level BPE with merges (``gemma4``)
    bpe_whitespace.py  character-level BPE of words, without spaces (``whitespace``)
    spm.py             SentencePiece's BPE by scores (``llama``)
    unigram.py         SentencePiece's Unigram (``t5``)
    normalizer.py      text normalization before it
    wordpiece.py       WordPiece (``bert``)
    rwkv_world.py      longest match of byte pieces (``rwkv``)
    short_texts.py     short texts without the tables of a library
    fill_in_middle.py  prompts of the text before and after a gap
    ids_only.py        files without a vocabulary

``sentencepiece`` and ``tokenizers`` are imported only when a model file needs them: each takes 20
to 40 ms.
"""
