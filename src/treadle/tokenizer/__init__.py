"""Text on one side, token ids on the other.

Nothing here imports ``sentencepiece`` or ``tokenizers`` before a model file asks for it: each takes
20 to 40 ms.
"""
