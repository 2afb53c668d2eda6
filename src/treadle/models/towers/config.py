"""Configuration of a tower or a projector: a stem, layers that are not causal, and a tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from treadle.base.fast_classes import dataclass
from treadle.models.arch import Arch, RopePairs
from treadle.models.config import Config, Layer
from treadle.models.mixers.names import FUSED

if TYPE_CHECKING:
    from treadle.models.rope import Rope
    from treadle.models.towers.stages import TowerStage

GRAPH = "tower"


@dataclass(frozen=True)
class TowerConfig(Config):
    """The hyper-parameters of a tower, or of a projector, which is a tower without layers.

    n_given: width of the rows that the host writes for a run, such as the values of a patch.
    stem: stages before the layers; the first reads the given rows.
    tail: stages after the layers; a tower without layers needs none.
    deep: layers whose states are results too, named ``deep.N``.
    """

    n_given: int = 0
    stem: tuple[TowerStage, ...] = ()
    tail: tuple[TowerStage, ...] = ()
    deep: tuple[int, ...] = ()


def tower_layer(
    i: int,
    *,
    n_embd: int,
    n_head: int,
    n_ff: int,
    gated: bool = False,
    fused: bool = False,
    rope: bool = False,
    head_dim: int = 0,
    v_norm: bool = False,
    windowed: bool = False,
) -> Layer:
    """Return the record of layer ``i`` of a tower.

    gated: the FFN has a gate. fused: queries, keys and values are one matrix. rope: queries and
        keys are rotated by the tower's table. head_dim: 0 for ``n_embd / n_head``. v_norm: values
        have a norm without weights. windowed: patches attend to those of their window only.
    """
    dims = head_dim or n_embd // n_head
    return Layer(
        n_head=n_head,
        n_head_kv=n_head,
        head_dim=dims,
        head_dim_v=dims,
        n_ff=n_ff,
        kv_from=i,
        causal=False,
        window=WINDOWED if windowed else 0,
        chunked=windowed,  # attention items bound the window, kernels do not
        rope=0 if rope else None,
        mixer=FUSED if fused else "attention",
        ffn="gated" if gated else "plain",
        v_norm=v_norm,
    )


# A window that bounds nothing: it tells the pool of layers with windows from the others'.
WINDOWED = 1 << 30


def tower_config(
    name: str,
    *,
    n_given: int,
    stem: tuple[TowerStage, ...],
    n_embd: int = 0,
    norm_eps: float = 1e-6,
    layers: tuple[Layer, ...] = (),
    tail: tuple[TowerStage, ...] = (),
    deep: tuple[int, ...] = (),
    activation: str = "gelu",
    norm: Literal["rms", "layer"] = "layer",
    pairs: RopePairs = "none",
    ropes: tuple[Rope, ...] = (),
    attn_scale: float = 0.0,
) -> TowerConfig:
    """Return a tower's configuration. ``name``: for messages; ``pairs``: the pairs that rope
    rotates (``Arch.rope``); ``attn_scale``: scale of scores, 0.0 for 1/sqrt(head_dim); the others:
    as in ``TowerConfig``, ``Config`` and ``Arch``.
    """
    dims = layers[0].head_dim if layers else 1
    return TowerConfig(
        arch=Arch(
            name,
            graph=GRAPH,
            rope=pairs,
            activation=activation,
            gated=any(layer.ffn == "gated" for layer in layers),
            norm=norm,
        ),
        n_embd=n_embd or n_given,
        n_vocab=1,
        n_ctx_train=1,
        norm_eps=norm_eps,
        embd_scale=1.0,
        attn_scale=attn_scale or dims**-0.5,
        attn_softcap=0.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        pooling="mean",
        ropes=ropes,
        layers=layers,
        n_given=n_given,
        stem=stem,
        tail=tail,
        deep=deep,
    )
