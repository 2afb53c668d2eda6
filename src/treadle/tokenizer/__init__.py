"""Tokenizers: text to token ids and back.

``sentencepiece`` and ``tokenizers`` are imported only when a model file needs them: each takes 20
to 40 ms.
"""
