"""Text on one side, token ids on the other: tokenizers, chat templates, grammars.

Nothing here imports ``sentencepiece``, ``tokenizers``, ``jinja2`` or ``llguidance`` before a model
file asks for it: each takes 20 to 40 ms.
"""
