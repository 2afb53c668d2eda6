"""The fields of a family: how one ``model_type`` of transformers differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader

Windowed = list[bool] | None
PAIRS = "norm"  # rows in GGUF's order, for an architecture whose folders have either order
GELU_TANH = "gelu_pytorch_tanh"  # transformers' name of GGUF's gelu


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers: its differences from Llama.

    arch: GGUF's architecture.
    defaults: transformers' own, for keys that config.json may omit. A key that only few families
        have must be listed here to be read, with None if it has no default.
    names: table of its tensor names, see ``convert/hf/tensor_names.py``.
    words: by Llama's name of a key, the family's own.
    older_words: the same for older files, which contain one of these names.
    activation: required value of ``hidden_act`` (or ``hidden_activation``): that of GGUF's
        architecture of this name.
    older_activation: the value in its first files, which transformers treats as ``activation``.
    norm_shift: amount added to norm weights in GGUF (Gemma multiplies by 1 + weight).
    unshifted: endings of the names of norms that ``norm_shift`` leaves as they are.
    windowed: returns a flag per layer: whether it sees ``sliding_window`` tokens only. Used without
        ``layer_types``; None if the window is unused.
    own_local_rope: layers with a window have their own RoPE base, never scaled.
    paired: RoPE pairs are adjacent in a head, as in GGUF; its rows keep their order.
    copied: further keys of config.json, numbers or flags, and their GGUF names.
    only: for some keys, the only value that treadle supports.
    by_head: ``attn_qkv`` interleaves queries, key and value of each key head; GGUF has all queries
        first.
    transposed: matrices in layers are [in, out].
    score_names: tensor names of the head that scores pairs of texts, if it may have one.
    positions_behind_pad: learned positions start after that of ``pad_token_id``.
    in_place: GGUF has no such architecture: the model runs from its folder only.
    normalize_keys: returns its keys under this family's names, if some have several spellings.
    variant: returns the actual family from the keys, if one ``model_type`` stands for several;
        None: this one.
    n_ff_default: ``intermediate_size`` if it is null, in units of ``hidden_size``.
    experts: it is a mixture of experts.
    derived: returns rules for tensors that GGUF stores differently, see
        ``convert/sources/derived_tensors.py``.
    packed: the ``quant_method`` of packed weights that the rules of ``derived`` unpack.
    extra_layers: the key with the number of MTP layers after the last layer.
    turns: whether queries and keys have RoPE, if the architecture has one.
    more: returns further GGUF keys, added after those of all families; None removes a key.
    folded_by_mlx: mlx-lm multiplies factors of config.json into the weights that it saves.
    numbers: by name after "layers.N.", the tensors of each layer that hold one number, and the GGUF
        key of the list of them. A name with a leading slash is the last two words of a tensor
        outside layers, with the key of its number.
    beside: returns further GGUF keys from outside the text part of a multimodal model.
    in_layers: returns a tensor's name with the number of its layer, if folders count the layers of
        several stacks separately.
    tables: GGUF tensors that may lack rows of the last tokens, which then use the first row.
    drafts: it is a drafter, which may lack embeddings, output and tokenizer: it then uses those of
        its target model.
    copies: names of tensors that hold one and the same matrix: the first that a checkpoint has is
        used.
    copied_keys: keys copied to GGUF as they are, because ``derived`` needs them and no GGUF key
        shows them.
    """

    arch: str
    defaults: Mapping[str, Any]
    names: Names = field(default_factory=lambda: LLAMA)
    words: Mapping[str, str] = field(default_factory=dict)
    older_words: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    older_activation: str = ""
    norm_shift: float = 0.0
    unshifted: tuple[str, ...] = ("ssm_norm.weight",)
    windowed: Callable[[MetadataReader, int], Windowed] = lambda keys, n_layer: None
    own_local_rope: bool = False
    paired: bool = False
    copied: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    by_head: bool = False
    transposed: bool = False
    score_names: Names = field(default_factory=dict)
    positions_behind_pad: bool = False
    in_place: bool = False
    normalize_keys: Callable[[MetadataReader], Mapping[str, Any]] = lambda keys: keys.values
    variant: Callable[[MetadataReader], Family | None] = lambda keys: None
    n_ff_default: int = 0
    experts: bool = False
    derived: Callable[[MetadataReader], Sequence[DerivationRule]] = lambda keys: ()
    packed: str = ""
    extra_layers: str = ""
    turns: Callable[[MetadataReader], bool] = lambda keys: True
    more: Callable[[MetadataReader, int], dict[str, Any]] = lambda keys, n_layer: {}
    folded_by_mlx: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[MetadataReader], dict[str, Any]] = lambda whole: {}
    copied_keys: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    drafts: bool = False
    in_layers: Callable[[MetadataReader, str], str] | None = None

    def word(self, key: str) -> str:
        """Return this family's name of the key that Llama calls ``key``."""
        return self.words.get(key, key)
