"""Tokenizers of checkpoints, converted to GGUF's ``tokenizer.*`` keys.

::

    tokenizer.py            read_tokenizer: all keys of a Hugging Face folder
    pretokenizer.py         the pre-tokenizer's name, from the structure of tokenizer.json
    encoder.py              tokenizer.json with WordPiece or Unigram
    special_tokens.py       special and added tokens, merged from five files
    chat_template.py        chat templates
    sentence_settings.py    sentence-transformers' settings of the tokenizer
    sentencepiece_model.py  tokenizer.model and spiece.model (protobuf)
    spm_keys.py             the keys of a sentencepiece vocabulary
    tiktoken.py             Llama 3's tokenizer.model, a list of ranks
    kimi.py                 Kimi's list of ranks
    chatglm.py              ChatGLM's vocabularies
"""
