"""HTML for notebooks: attention weights and logit lenses."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.api.hooks import AttentionWeights, LensLogits

MOST_TOKENS = 40  # the last ones are shown
CELL = 6  # pixels of a weight
STYLE = "padding:1px 4px;text-align:left;white-space:pre;color:#000"


def attention_picture(found: AttentionWeights) -> str:
    """Return HTML with a square for each head of ``found``: a row for each query, a column for each
    key, darker for more weight, with the tokens in the tooltips. Only the last MOST_TOKENS tokens
    are shown.
    """
    weights = found.weights[:, -MOST_TOKENS:, -MOST_TOKENS:]
    pieces = found.pieces[-MOST_TOKENS:]
    n_head, n, _ = weights.shape
    size = CELL * n
    heads = []
    for head in range(n_head):
        cells = []
        for query, key in np.argwhere(weights[head] >= 0.02).tolist():
            weight = float(weights[head, query, key])
            title = escape(f"{pieces[query]!r} to {pieces[key]!r}: {weight:.2f}")
            cells.append(
                f"<rect x='{CELL * key}' y='{CELL * query}' width='{CELL}' height='{CELL}' "
                f"fill='#1565c0' fill-opacity='{weight:.2f}'><title>{title}</title></rect>"
            )
        heads.append(
            "<figure style='display:inline-block;margin:4px'>"
            f"<svg width='{size}' height='{size}' style='border:1px solid #999'>"
            f"{''.join(cells)}</svg><figcaption>head {head}</figcaption></figure>"
        )
    more = f", the last {n} of {len(found.ids)} tokens" if n < len(found.ids) else ""
    return f"<div>attention of layer {found.layer}{more}<br>{''.join(heads)}</div>"


def lens_table(found: LensLogits) -> str:
    """Return an HTML table of the likeliest token of each state in ``found``: a row for each layer,
    a column for each of the last MOST_TOKENS tokens, coloured by the token's probability.
    """
    logits = found.logits[:, -MOST_TOKENS:]
    positions = found.positions[-MOST_TOKENS:]
    best = logits.argmax(-1)
    top = logits.max(-1)
    share = 1 / np.exp(logits - top[..., None]).sum(-1, dtype=np.float64)
    heads = [
        f"<th style='{STYLE}'>{escape(found.piece_of(found.ids[at]))}</th>" for at in positions
    ]
    lines = [f"<tr><th>after layer</th>{''.join(heads)}</tr>"]
    for layer, tokens, shares in zip(found.layers, best.tolist(), share.tolist(), strict=True):
        name = str(layer - 1) if layer else "(embeddings)"
        cells = [
            f"<td style='{STYLE};background:rgba(21,101,192,{p:.2f})' title='{p:.3f}'>"
            f"{escape(found.piece_of(token))}</td>"
            for token, p in zip(tokens, shares, strict=True)
        ]
        lines.append(f"<tr><th>{name}</th>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
