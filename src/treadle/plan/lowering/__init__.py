"""Lowering from graphs to plans: the ops of ``models/ops.py`` as steps for CPU and CUDA devices.

::

    ops.py          build_plan; PlanOps: the ops, and the table of ops in other modules
    deferred.py     Value and its kinds: an op's result before its steps exist
    materialize.py  Materializer: emits the steps of a deferred value on first use
    steps.py        Steps: the plan under construction, its buffers and constants
    inputs.py       the inputs of each run: tokens, sequences, pages, rope tables
    observed.py     ObservedOps: plans with places for hooks
    logits.py       softcap, and the largest logits of each row
    lora.py         the products of LoRA adapters
    control.py      control vectors
    media.py        rows of pictures and sound

    attention.py        attention over pages
    kv_store.py         the store of keys and values without attention
    cross.py            cross attention to an encoder's rows
    latent.py           latent attention (MLA)
    indexer.py          the keys that an indexer chooses (sparse attention)
    compressed.py       attention to rows that stand for units of tokens
    relative_logits.py  biases of scores by distance, made by each query
    recurrent.py        convolutions, Mamba, gated delta rule, Kimi Delta Attention
    wkv.py              RWKV-7

    experts.py              mixture of experts
    elementwise.py          clamps, factors, xIELU, AltUp, LAuReL, sparse gates
    streams.py              hyper-connections (several streams of hidden states), n-gram embeddings
    attention_residuals.py  attention residuals: sums of the states before blocks of layers
    clamped_products.py     products whose inputs and results are clamped to bounds in the file
    clusters.py             an output matrix of which only some clusters of rows are multiplied
"""
