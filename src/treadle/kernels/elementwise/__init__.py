"""Kernels of one pass over rows: embeddings, norms, gates, softcaps, the top logits.

::

    elementwise.py          Embed, Norm, Pack; loops over a row, and its mean
    add.py                  sums of two buffers, or of rows and a small matrix
    column_norm.py          norms of some columns, in place
    scale.py                rows times a factor: attention temperature, expert inputs
    clamp.py                clamping to limits
    softcap.py              softcap of logits or scores
    sparse_gate.py          a gate that passes only values far above the mean
    xielu.py                the xIELU activation
    fill.py                 columns of logits without a token
    top_logits.py           the 64 largest logits of a row, and the softmax's denominator
    pooling.py              one row for each sequence: mean, first or last token
    media_rows.py           rows of pictures and sound
    ngram.py                rows of a table chosen by a hash of n-grams
    control_vectors.py      control vectors
    altup.py                AltUp and LAuReL: parallel streams, predicted and corrected
    streams.py              hyper-connections: parallel streams, and steps they share
    gated_streams.py        hyper-connections with independent weights
    manifold.py             hyper-connections with doubly stochastic weights
    attention_residuals.py  attention residuals: a softmax over states of earlier layers
"""
