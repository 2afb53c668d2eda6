"""What a family of transformers' models differs in: a row's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from treadle.base.fast_dataclass import dataclass
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.keys import MetadataReader

Windowed = list[bool] | None
PAIRS = "norm"  # rows as GGUF has them, where folders of an architecture have them either way
GELU_TANH = "gelu_pytorch_tanh"  # transformers' name of what GGUF calls gelu


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    defaults: transformers' own, for keys that config.json may leave out. A key that few families
        have is theirs if it is here, with None where there is no default.
    names: of its tensors, a table in ``hf_names``.
    words: its own words for keys, by Llama's.
    older_words: those of files that use one of them.
    activation: what ``hidden_act`` (or ``hidden_activation``) must be: the one that GGUF's
        architecture of this name has.
    older_activation: what its first files say, and transformers takes for ``activation``.
    norm_shift: what GGUF's norm weights are larger by (Gemma multiplies by 1 + weight).
    windowed: which layers see ``sliding_window`` tokens only, where ``layer_types`` is not given;
        None where the window is not in use.
    own_local_rope: layers with a window have a rope base of their own, never scaled.
    paired: neighbours in a head turn together here as in GGUF; its rows stay where they are.
    copied: further keys, and what GGUF calls them; numbers and flags.
    only: keys that have one value with which treadle computes.
    by_head: ``attn_qkv`` holds queries, key and value of one head of keys after the other, where
        GGUF has all queries first.
    transposed: matrices in layers are [in, out].
    score_names: of the tensors of a head that scores pairs of texts, if it may have one.
    positions_behind_pad: learned positions begin behind that of ``pad_token_id``.
    in_place: GGUF has no architecture for it: it runs from its folder alone.
    respelt: its keys, where some are spelt in several ways, in the words of this row.
    variant: what it is by its keys, where one name stands for several; None: this.
    n_ff_default: ``intermediate_size`` where it is null, in units of ``hidden_size``.
    experts: it has some.
    made: rules for tensors that lie otherwise than GGUF's; see ``hf_made``.
    packed: the ``quant_method`` of packed weights that ``made`` knows.
    extra_layers: the key that counts layers behind the last, which predict further tokens.
    turns: whether queries and keys have a rope, where the architecture has one.
    more: further keys of GGUF, behind those that all families have; None takes one of these away.
    folded_by_mlx: mlx-lm multiplies factors of config.json into the weights that it saves.
    numbers: tensors of one number in each layer, behind "layers.N.", and GGUF's key of all of them.
    beside: the same of what stands beside the part for text, in a model of text and pictures.
    tables: of GGUF's tensors those that may lack rows of the last tokens, which read the first one.
    told: keys that it repeats there, for what ``made`` does with them no GGUF file shows.
    """

    arch: str
    defaults: Mapping[str, Any]
    names: Names = field(default_factory=lambda: LLAMA)
    words: Mapping[str, str] = field(default_factory=dict)
    older_words: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    older_activation: str = ""
    norm_shift: float = 0.0
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
    respelt: Callable[[MetadataReader], Mapping[str, Any]] = lambda keys: keys.values
    variant: Callable[[MetadataReader], Family | None] = lambda keys: None
    n_ff_default: int = 0
    experts: bool = False
    made: Callable[[MetadataReader], Sequence[DerivationRule]] = lambda keys: ()
    packed: str = ""
    extra_layers: str = ""
    turns: Callable[[MetadataReader], bool] = lambda keys: True
    more: Callable[[MetadataReader, int], dict[str, Any]] = lambda keys, n_layer: {}
    folded_by_mlx: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[MetadataReader], dict[str, Any]] = lambda whole: {}
    told: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    def word(self, key: str) -> str:
        """What this family calls Llama's ``key``."""
        return self.words.get(key, key)
