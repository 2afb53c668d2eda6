"""Model families: a row (``Family``) for each ``model_type`` of transformers.

::

    registry.py    all rows, by ``model_type``
    defaults.py    transformers' defaults that many families share
    experts.py     keys and rules of mixtures of experts
    mamba.py       rows with Mamba layers; keys and rules of Mamba and Mamba-2
    streams.py     keys, names and rules of several residual streams (hyper-connections)
    kda.py         keys, names and rules of Kimi Delta Attention
    deepseek.py    DeepSeek's rows; keys and rules of latent attention and of indexers
    multimodal.py  where a multimodal config.json has its text part
    drafters.py    drafters that read a target model's hidden states

All other modules have the rows of one vendor or lineage, after which they are named.

A function that takes ``keys`` reads config.json, of a multimodal model its text part. One that
returns "keys" returns GGUF's, without the architecture's prefix; "rules" are ``DerivationRule``;
``rows`` are a tensor's values, [rows, columns], or [matrices, rows, columns] of a stack.
"""
