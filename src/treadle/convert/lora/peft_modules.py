"""Maps a module of transformers to matrices of a GGUF model, and its adapter accordingly.

Most modules have a name in their family's table. Others become matrices by a ``DerivationRule``: an
operation on rows applies to B, one on columns to A, and two matrices of one module share A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.families.registry import FAMILIES, VARIANTS
from treadle.convert.hf.tensor_names import NAME, NOT_STATES
from treadle.convert.hf.tensors import SCORING
from treadle.errors import UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.models.archs import ARCHS
from treadle.models.keys import ArchMetadata as ModelKeys

if TYPE_CHECKING:
    from treadle.convert.hf.family import Family
    from treadle.convert.sources.derived_tensors import DerivationRule, Make, Side
    from treadle.files.gguf import GGUF

NO_SUCH = "a module without a matrix in the model"
OTHERWISE = (
    "a matrix that the model stores in another form (per head, for example): its adapter cannot be "
    "mapped"
)

# Keys of config.json that rules read, and the equivalent GGUF keys.
_SAME: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "v_head_dim": "attention.value_length_mla",
    "num_experts": "expert_count",
    "n_groups": "ssm.group_count",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_ssm": "ssm.inner_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
}


@dataclass(frozen=True, eq=False)
class PeftModule:
    """A GGUF matrix, or part of one, that a module of transformers maps to.

    ``make`` converts A or B, as ``side`` says ("A", "B"); None: both stay unchanged.
    """

    name: str  # GGUF's, with layer and suffix
    family: Family  # whose table or rule has the module
    make: Make | None = None
    side: Side = ""


class Modules:
    """The map from transformers' module names to matrices of one model. Raises UnsupportedError for
    an architecture that no family has.
    """

    def __init__(self, gguf: GGUF, arch: str) -> None:
        every = (*FAMILIES.values(), *VARIANTS)
        self._gguf, self._keys = gguf, ModelKeys(gguf, arch)
        self._is_encoder = arch in ARCHS and ARCHS[arch].graph == "encoder"
        self.families = [family for family in every if family.arch == arch]
        if not self.families:
            raise UnsupportedError(f"PEFT adapters are not supported for architecture {arch}")

    def find(self, module: str) -> list[PeftModule]:
        """Return the matrices of a module. Raises UnsupportedError with the reason if there are
        none.
        """
        match = NAME.fullmatch(f"{module}.weight")
        if match is None:
            raise UnsupportedError(NO_SUCH)
        stem = match["stem"]
        layer = match["layer"]
        found = [
            PeftModule(gguf_name(family.names[stem], layer), family)
            for family in self.families
            if stem in family.names
        ]
        found.sort(key=lambda part: part.name not in self._gguf.tensors)  # the model's names first
        if found:
            return found[:1]
        why = NO_SUCH
        for family, rule in self.rules():
            if rule.of != (f"{stem}.weight",):
                continue
            if not rule.side:
                why = OTHERWISE
                continue
            if untold := [key for key in family.copied_keys if not self._keys.has(key)]:
                raise UnsupportedError(_missing_key(untold[0]))
            parts = [
                PeftModule(gguf_name(stem_of(family, to), layer), family, make, rule.side)
                for to, make in rule.gives.items()
            ]
            if all(part.name in self._gguf.tensors for part in parts):
                return parts
        raise UnsupportedError(why)

    def is_unread(self, module: str) -> bool:
        """Return whether the module comes after an encoder's last hidden states (pooling, heads),
        so that treadle does not run it.
        """
        if any(name.startswith(SCORING) for name in self._gguf.tensors):
            return False
        return self._is_encoder and bool(NOT_STATES.fullmatch(f"{module}.weight"))

    def rules(self) -> Iterator[tuple[Family, DerivationRule]]:
        """Yield the rules for tensors that GGUF stores in another form, each with its family."""
        for family in self.families:
            for rule in self._rules(family):
                yield family, rule

    def _rules(self, family: Family) -> Sequence[DerivationRule]:
        said = {word: self._keys.get(key) for word, key in _SAME.items()}
        said |= {key: _listed(self._keys.get(key)) for key in family.copied_keys}
        n_inner = said["mamba_d_ssm"]
        n_heads = said["linear_num_value_heads"]
        if n_inner and n_heads:
            said["linear_value_head_dim"] = n_inner // n_heads
        return family.derived(MetadataReader(said, self._gguf.path, family.defaults))


def stem_of(family: Family, made: str) -> str:
    """Return GGUF's name, without layer and suffix, for the tensor ``made``, a result of one of the
    family's rules.
    """
    return family.names[made.removesuffix(".weight")]


def gguf_name(stem: str, layer: str | None) -> str:
    """Return the full GGUF name of a matrix, "blk.{layer}.{stem}.weight"; outside layers (``layer``
    is None) "{stem}.weight".
    """
    return f"{stem}.weight" if layer is None else f"blk.{layer}.{stem}.weight"


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else list(value)


def _missing_key(key: str) -> str:
    return (
        f"a matrix scaled by {key}, which this GGUF file lacks: load the Hugging Face folder, or a "
        "file written by treadle convert"
    )
