"""llama.cpp's quantisation mixes: the format of each tensor in a file quantised to ``Q4_K_M``, say.

A mix is a base format, plus choices for tensors that need a finer format or tolerate a coarser one:
the first choice whose condition holds applies. A tensor's name gives its role; its ``TensorRole``
holds what a condition may test. The table follows llama.cpp (as in llama-cpp-python 0.3.36);
``tests/quantize/test_quantize.py`` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import field

from treadle.base.fast_classes import dataclass
from treadle.convert.recipe import FLOATS


@dataclass(frozen=True)
class TensorRole:
    """The facts that a condition may test: ``layer``, ``fits`` and ``expert`` about one tensor, the
    others about its model and the call.
    """

    layer: int  # its index among the tensors of its role
    n_layer: int
    n_gqa: int  # query heads that share a key head
    n_expert: int
    arch: str
    deep: bool  # the model has 80 layers and grouped-query attention, like Llama 2 and 3 70B
    imatrix: bool  # an importance matrix is given to the call
    fits: bool  # the tensor's row length is a multiple of the base format's block
    expert: bool  # the tensor holds several experts' matrices


@dataclass(frozen=True)
class RoleCondition:
    """A condition on a tensor and its model (``TensorRole``); conditions combine by ``&``, ``|``
    and ``~``.
    """

    test: Callable[[TensorRole], bool]

    def __and__(self, other: RoleCondition) -> RoleCondition:
        return RoleCondition(lambda p: self.test(p) and other.test(p))

    def __or__(self, other: RoleCondition) -> RoleCondition:
        return RoleCondition(lambda p: self.test(p) or other.test(p))

    def __invert__(self) -> RoleCondition:
        return RoleCondition(lambda p: not self.test(p))


Choice = tuple[str, RoleCondition]
Choices = tuple[Choice, ...]


def first(part: int) -> RoleCondition:
    """Return the condition that the tensor's layer is among the first ``1 / part`` of all."""
    return RoleCondition(lambda p: p.layer < p.n_layer // part)


def first_layers(n: int) -> RoleCondition:
    """Return the condition that the tensor's layer is among the first ``n``."""
    return RoleCondition(lambda p: p.layer < n)


EARLY_FALCONS = frozenset({"falcon"})  # fused qkv, other sensitivities
ALWAYS = RoleCondition(lambda p: True)
GQA4 = RoleCondition(lambda p: p.n_gqa >= 4)
EXPERTS8 = RoleCondition(lambda p: p.n_expert == 8)
EXPERTS4 = RoleCondition(lambda p: p.n_expert >= 4)
EXPERT = RoleCondition(lambda p: p.expert)
FALCON = RoleCondition(lambda p: p.arch in EARLY_FALCONS)
IMATRIX = RoleCondition(lambda p: p.imatrix)
DEEP = RoleCondition(lambda p: p.deep)
MISFIT = RoleCondition(lambda p: not p.fits)
# The first and last eighth of the layers, and every third layer in between.
SPREAD = RoleCondition(
    lambda p: (
        p.layer < p.n_layer // 8
        or p.layer >= 7 * p.n_layer // 8
        or (p.layer - p.n_layer // 8) % 3 == 2
    )
)
MIDDLE = RoleCondition(lambda p: p.n_layer // 8 <= p.layer < 7 * p.n_layer // 8)

# Roles and the patterns of their tensor names, tried in this order.
ROLES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("output", r"^output\.weight$"),
        ("token_embd", r"^(per_layer_)?token_embd\.weight$"),
        ("attn_v", r"attn_(v|qkv|kv_b)\.weight"),
        ("attn_k", r"attn_k\.weight"),
        ("attn_q", r"attn_q\.weight"),
        ("attn_output", r"attn_out(put)?\.weight"),  # the short form: in projector files
        ("ffn_down", r"ffn_down"),
        ("ffn_gate", r"ffn_gate"),
        ("ffn_up", r"ffn_up"),
    )
)

# Matrices that are never quantised: they are small and sensitive.
KEPT = re.compile(
    rf"{FLOATS.pattern}|altup|laurel|per_layer_model_proj|attn_rel_b\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight"
)

# Fallback for a format whose block does not divide the row length; F16 if the fallback fails too.
# It is the format with blocks of 32 that is nearest in bits; for Q4_K and up, the next one that
# loses no more. llama.cpp uses Q4_0 for Q2_K, Q3_K and all ternary formats; IQ4_NL has the same
# size and half the loss, and Q2_0 represents every ternary weight exactly.
FALLBACKS = {
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "Q2_0"),
    "Q2_0": "Q4_0",
    **dict.fromkeys(
        (
            "Q2_K",
            "Q3_K",
            "IQ1_S",
            "IQ1_M",
            "IQ2_XXS",
            "IQ2_XS",
            "IQ2_S",
            "IQ3_XXS",
            "IQ3_S",
            "IQ4_XS",
            "IQ2_K",
            "IQ2_KS",
            "IQ3_K",
            "IQ3_KS",
            "IQ4_KS",
            "IQ4_KSS",
            "IQ1_KT",
            "IQ2_KT",
            "IQ3_KT",
            "IQ4_KT",
        ),
        "IQ4_NL",
    ),
    **dict.fromkeys(("IQ4_K", "IQ5_KS"), "Q5_0"),
    "IQ5_K": "Q5_1",
    "IQ6_K": "Q8_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
LAST_RESORT = "F16"

# Formats for weights that were trained in them (gpt-oss's experts, BitNet): their loss on other
# weights, and a better format for those, with no more bits if rows are multiples of 256.
TRAINED = {
    "MXFP4": ("2.4 times the squared error of IQ4_XS", "IQ4_XS"),
    "NVFP4": ("1.7 times the squared error of IQ4_NL", "IQ4_NL"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), ("almost all of the model's quality", "IQ2_XXS")),
    "Q1_0": ("almost all of the model's quality", "IQ1_S"),
}

# In a 70B model attn_v has an eighth of attn_q's rows, so a finer format costs little.
DEEPENED = {"Q3_K": "Q5_K", "Q4_K": "Q5_K"}

# Formats so coarse that without an importance matrix the model loses most of its quality.
WANTS_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})


@dataclass(frozen=True)
class QuantMix:
    """A row of the mix table: the format of each tensor in a file quantised to this mix."""

    name: str
    base: str  # the format of matrices for which no choice holds
    file_type: int | None  # llama.cpp's number: ``general.file_type``
    choices: dict[str, Choices] = field(default_factory=dict)  # by role

    def format_for(self, role: str, place: TensorRole) -> str:
        """Return the name of the format for a matrix of the role ``role`` (``role_of``): of the
        role's first choice whose condition holds at ``place``, else the base format.
        """
        return next(
            (fmt for fmt, when in self.choices.get(role, ()) if when.test(place)), self.base
        )


def role_of(name: str) -> str:
    """Return the role of the tensor called ``name``, a key of ``QuantMix.choices`` such as
    "attn_v"; "other" if no pattern matches.
    """
    return next((role for role, pattern in ROLES if pattern.search(name)), "other")


def always(fmt: str) -> Choice:
    """Return a choice of the format ``fmt`` that holds for all tensors."""
    return fmt, ALWAYS


OUTPUT: Choices = (("Q8_0", FALCON | MISFIT), always("Q6_K"))
COARSE_OUTPUT: Choices = (("Q8_0", FALCON | MISFIT), always("Q5_K"))
MORE_WITH_EXPERTS = ("Q5_K", EXPERTS8 & ~FALCON)


def mix(name: str, base: str, file_type: int, **own: Choices) -> QuantMix:
    """Return the mix called ``name``: its ``own`` choices, by role, before those common to all
    mixes. ``base``: the format of matrices for which no choice holds; ``file_type``: as in
    ``QuantMix``.
    """
    attn_v = own.pop("attn_v", ())
    deeper: list[Choice] = []
    for fmt, when in (*attn_v, always(base)):
        if fmt in DEEPENED:
            deeper.append((DEEPENED[fmt], DEEP & when))
        deeper.append((fmt, when))
    choices = {
        "output": OUTPUT,
        "attn_v": (("Q8_0", EXPERTS8), *deeper),
        "attn_k": (("Q8_0", EXPERTS8), *own.pop("attn_k", ())),
        **own,
    }
    return QuantMix(name, base, file_type, choices)


def coarse_mix(name: str, base: str, file_type: int, more: str, embd: str, output: str) -> QuantMix:
    """Return a mix of about 2 bits per weight. Names of formats: ``base``, for matrices for which
    no choice holds; ``more``, for the most sensitive matrices; ``embd``, for the embeddings;
    ``output``, for attention's output matrices. ``file_type``: as in ``QuantMix``.
    """
    attn_output: Choices = (("Q5_K", EXPERTS8), always(output))
    choices = {
        "output": COARSE_OUTPUT,
        "token_embd": (always(embd),),
        "attn_v": (("Q4_K", GQA4 | EXPERTS4), always(more)),
        "attn_k": (("Q4_K", EXPERTS8),),
        "ffn_down": ((more, first(8)),),
        "attn_output": attn_output,
    }
    return QuantMix(name, base, file_type, choices)


def unquantized(name: str, file_type: int) -> QuantMix:
    """Return an unquantised mix: all matrices in the one format ``name``. ``file_type``: as in
    ``QuantMix``.
    """
    return QuantMix(name, name, file_type)


def narrow(fmt: str) -> Choice:
    """Return a choice of the format ``fmt`` for all models but early Falcons and those with 8
    experts.
    """
    return fmt, ~FALCON & ~EXPERTS8


def _float_rows() -> Iterable[QuantMix]:
    yield unquantized("F32", 0)
    yield unquantized("F16", 1)
    yield unquantized("BF16", 32)


def _block_rows() -> Iterable[QuantMix]:
    yield mix("Q4_0", "Q4_0", 2, ffn_down=(("Q4_1", IMATRIX & first(8)),))
    yield mix("Q4_1", "Q4_1", 3)
    yield mix("Q5_0", "Q5_0", 8, ffn_down=(("Q5_1", IMATRIX & first(8)),))
    yield mix("Q5_1", "Q5_1", 9)
    yield mix("Q8_0", "Q8_0", 7, output=())
    yield mix(
        "Q2_K",
        "Q2_K",
        10,
        attn_v=(("Q4_K", GQA4), always("Q3_K")),
        ffn_down=(always("Q3_K"),),
        attn_output=(MORE_WITH_EXPERTS, narrow("Q3_K")),
    )
    yield mix("Q2_K_S", "Q2_K", 21, attn_v=(("Q4_K", GQA4),), ffn_down=(("Q4_K", first(8)),))
    yield mix("Q3_K_S", "Q3_K", 11, attn_output=(MORE_WITH_EXPERTS,))
    yield mix(
        "Q3_K_M",
        "Q3_K",
        12,
        attn_v=(("Q5_K", first_layers(2)), always("Q4_K")),
        ffn_down=(("Q5_K", first(16)), ("Q4_K", ~FALCON | SPREAD)),
        attn_output=(MORE_WITH_EXPERTS, narrow("Q4_K")),
    )
    yield mix(
        "Q3_K_L",
        "Q3_K",
        13,
        attn_v=(always("Q5_K"),),
        ffn_down=(("Q4_K", FALCON), always("Q5_K")),
        attn_output=(("Q4_K", FALCON), narrow("Q5_K")),
    )
    yield mix(
        "Q4_K_S",
        "Q4_K",
        14,
        attn_v=(("Q5_K", first_layers(4)),),
        ffn_down=(("Q5_K", ~FALCON & first(8)),),
        attn_output=(MORE_WITH_EXPERTS,),
    )
    yield mix(
        "Q4_K_M",
        "Q4_K",
        15,
        attn_v=(("Q6_K", SPREAD),),
        ffn_down=(
            ("Q6_K", FALCON & first(16)),
            ("Q5_K", FALCON & SPREAD),
            ("Q4_K", FALCON),
            ("Q6_K", SPREAD),
        ),
        attn_output=(MORE_WITH_EXPERTS,),
    )
    yield mix("Q5_K_S", "Q5_K", 16)
    yield mix("Q5_K_M", "Q5_K", 17, attn_v=(("Q6_K", SPREAD),), ffn_down=(("Q6_K", SPREAD),))
    yield mix("Q6_K", "Q6_K", 18)


def _coarse_rows() -> Iterable[QuantMix]:
    yield coarse_mix("IQ1_S", "IQ1_S", 24, "Q2_K", "Q2_K", "IQ2_XXS")
    yield coarse_mix("IQ1_M", "IQ1_M", 31, "Q2_K", "Q2_K", "IQ2_XXS")
    yield coarse_mix("IQ2_XXS", "IQ2_XXS", 19, "Q2_K", "Q2_K", "IQ2_XXS")
    yield coarse_mix("IQ2_XS", "IQ2_XS", 20, "Q2_K", "Q2_K", "IQ2_XS")
    yield coarse_mix("IQ2_S", "IQ2_XS", 28, "IQ3_S", "IQ3_S", "IQ3_S")
    yield coarse_mix("IQ2_M", "IQ2_S", 29, "IQ3_S", "IQ3_S", "IQ3_S")
    yield mix(
        "IQ3_XXS",
        "IQ3_XXS",
        23,
        output=COARSE_OUTPUT,
        token_embd=(always("IQ3_S"),),
        attn_v=(("Q4_K", GQA4), ("IQ3_S", ~IMATRIX)),
        attn_k=(always("IQ2_S"),),
        attn_q=(always("IQ2_S"),),
        ffn_down=(("Q4_K", ~IMATRIX & first(8)), ("Q3_K", ~IMATRIX)),
        attn_output=(MORE_WITH_EXPERTS, narrow("IQ3_S")),
    )
    yield mix(
        "IQ3_XS",
        "IQ3_S",
        22,
        attn_v=(("Q4_K", GQA4),),
        attn_k=(always("IQ3_XXS"),),
        attn_q=(always("IQ3_XXS"),),
        ffn_gate=(("IQ3_XXS", MIDDLE),),
        ffn_up=(("IQ3_XXS", MIDDLE),),
        attn_output=(MORE_WITH_EXPERTS,),
    )
    yield mix("IQ3_S", "IQ3_S", 26, attn_v=(("Q4_K", GQA4),), attn_output=(MORE_WITH_EXPERTS,))
    yield mix(
        "IQ3_M",
        "IQ3_S",
        27,
        attn_v=(always("Q4_K"),),
        ffn_down=(("Q4_K", first(8) | (EXPERTS8 & SPREAD)),),
        attn_output=(MORE_WITH_EXPERTS, narrow("Q4_K")),
    )
    for name, file_type in (("IQ4_NL", 25), ("IQ4_XS", 30)):
        yield mix(
            name,
            name,
            file_type,
            attn_v=(("Q5_K", GQA4),),
            ffn_down=(("Q5_K", ~IMATRIX & first(8)),),
            attn_output=(MORE_WITH_EXPERTS,),
        )


def _other_rows() -> Iterable[QuantMix]:
    for name, file_type in (("TQ1_0", 36), ("TQ2_0", 37), ("Q2_0", 41)):
        yield mix(name, name, file_type, token_embd=(always("Q4_K"),))
    yield mix("Q1_0", "Q1_0", 40)
    # llama.cpp's mix for MoE models: MXFP4 models were trained with their experts in MXFP4.
    experts: Choices = (("MXFP4", EXPERT),)
    yield QuantMix(
        "MXFP4_MOE", "Q8_0", 38, dict.fromkeys(("ffn_down", "ffn_gate", "ffn_up", "other"), experts)
    )
    # The same for dense models, for which llama.cpp has no mix.
    ends: Choices = (always("Q8_0"),)
    for name, file_type in (("MXFP4", 38), ("NVFP4", 39)):
        yield QuantMix(name, name, file_type, {"output": ends, "token_embd": ends})


def _ik_rows() -> Iterable[QuantMix]:
    """Yield a mix for each of ik_llama.cpp's formats; attn_v gets about one bit more than the
    others.
    """
    for base, file_type, more in (
        ("IQ2_KS", 147, "IQ3_K"),
        ("IQ2_K", 138, "IQ3_K"),
        ("IQ3_KS", 154, "IQ4_K"),
        ("IQ3_K", 139, "IQ4_K"),
        ("IQ4_KSS", 148, "IQ5_K"),
        ("IQ4_KS", 145, "IQ5_K"),
        ("IQ4_K", 140, "IQ5_K"),
        ("IQ5_KS", 150, "IQ6_K"),
        ("IQ5_K", 141, "IQ6_K"),
        ("IQ6_K", 142, "IQ6_K"),
    ):
        embd: Choices = (always("IQ4_K"),) if base.startswith("IQ2") else ()
        yield mix(base, base, file_type, attn_v=(always(more),), token_embd=embd)
    for base, file_type, more in (
        ("IQ1_KT", 156, "IQ2_K"),
        ("IQ2_KT", 151, "IQ3_K"),
        ("IQ3_KT", 152, "IQ4_K"),
        ("IQ4_KT", 153, "IQ5_K"),
    ):
        embd = (always("Q4_K"),) if base.startswith(("IQ1", "IQ2")) else ()
        yield mix(base, base, file_type, attn_v=(always(more),), token_embd=embd)


MIXES: dict[str, QuantMix] = {
    row.name: row
    for rows in (_float_rows, _block_rows, _coarse_rows, _other_rows, _ik_rows)
    for row in rows()
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "FP32": "F32"}
