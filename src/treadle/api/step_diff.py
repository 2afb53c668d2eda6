"""Comparison of two models step by step: the first label whose values differ, and by how much.

Both models run the same token ids. The values of a label, ``[token, ...]``, are compared by their
*relative error*: the root mean square over the tokens of |b - a| / |a|. A step that computes
several products side by side is split, each with a *key* of its own (``L0.attn.q`` of
``L0.attn.qkv``), because formats decide which products share a step.

Errors add up from layer to layer. So the model runs twice: freely, and *aligned*, where every layer
begins with the reference's states. The error of an aligned step is its own layer's, and is compared
with the tolerance.

A tolerance is derived from the formats of the weights on both sides: four times (of attention eight
times) the largest of

- the rounding of this step's weights and packed input (``rounding``),
- the errors of the steps before it in the layer,
- ``FLOOR``, for sums of float32 in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.api.hooks import read_text, values_at
from treadle.base.fast_classes import dataclass
from treadle.engine.hooks import Call, Hook, HookedRun
from treadle.errors import TreadleError, UnsupportedError
from treadle.plan.hook_rows import HookPoint, PackedRows, label_of, state_rows

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.files.gguf import Tensor
    from treadle.plan.hook_rows import StepRows
    from treadle.plan.plan import Plan, Step

Floats = npt.NDArray[np.float32]

FLOOR = 2.0**-16  # relative: float32 sums of some thousand products, in another order
# Most that a step enlarges the errors before it. Attention has three: of queries, keys and values.
GROWTH = 4.0
GROWTH_ATTENTION = 8.0
MANTISSA = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}  # bits, the leading one included
MOST_TOKENS = 128  # logits of as many are computed in one run
START = "start"  # key of the states before the first layer
LOGITS = "logits"
# Keys of queries and keys: the dims of a head have an order of their own for each kind of rope.
QUERIES = (".attn.q", ".attn.k", ".attn.rope")


@dataclass(eq=False)
class StepFacts:
    """Facts about the step that wrote a key's values. ``part``: the product of several that it is,
    such as "q"; "" for a whole step. ``weights``: names of the tensors that it reads. ``source``:
    name of the buffer that it reads. ``adds``: a residual is added to its result. ``packed``: bits
    of each value that it writes for the next product, 32 for float32.
    """

    label: str
    part: str = ""
    weights: tuple[str, ...] = ()
    source: str = ""
    adds: bool = False
    is_norm: bool = False
    packed: int = 32


@dataclass(eq=False)
class StepRecord:
    """Values, float32 ``[token, ...]``, that the steps of one model wrote for a text, and facts
    about the steps, by key: ``L0.attn.q`` for a product of the label ``L0.attn.qkv``, else the
    label. The states after layer 5 have the key ``L5``.
    """

    values: dict[str, Floats]
    facts: dict[str, StepFacts]

    def __contains__(self, key: str) -> bool:
        return key in self.values


class StepRecorder(Hook):
    """Hook that records the values of all steps. ``aligned``: states between layers by key,
    ``[token, n_embd]``, which replace the model's own after these have been recorded; None: none
    are replaced.
    """

    def __init__(self, model: Model, aligned: Mapping[str, Floats] | None = None) -> None:
        self._n_embd = model.config.n_embd
        self._aligned = aligned or {}
        self.changes = bool(self._aligned)
        self._found: dict[str, list[Floats]] = {}
        self._facts: dict[str, StepFacts] = {}
        self._has_states = False

    def is_hooked(self, label: str) -> bool:
        return True

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        steps: dict[str, Step] = {}
        for step in plan.steps:
            steps.setdefault(label_of(step), step)
        for point in points:
            if not point.is_copy:
                yield point.end, self._recorder(point, steps.get(point.label))
        self._has_states = bool(plan.states)
        for i, (end, buffer) in enumerate(plan.states):
            key = f"L{i - 1}" if i else START
            if key in self._aligned:  # after the recorder of the same place
                rows = state_rows(buffer, self._n_embd)
                yield end, self._aligner(rows, self._aligned[key])

    def _recorder(self, point: HookPoint, step: Step | None) -> Call:
        keys = [
            (self._keep_facts(key, facts), columns) for key, facts, columns in split(point, step)
        ]

        def record(run: HookedRun) -> None:
            if not run.count(point.rows.count):
                return
            values = values_at(run, point).values
            for key, columns in keys:
                part = values if columns is None else values[..., columns]
                self._found.setdefault(key, []).append(part)

        return record

    def _keep_facts(self, key: str, facts: StepFacts) -> str:
        self._facts.setdefault(key, facts)
        return key

    def _aligner(self, rows: StepRows, states: Floats) -> Call:
        def align(run: HookedRun) -> None:
            run.write(rows, np.ascontiguousarray(states[run.positions]))

        return align

    def record(self) -> StepRecord:
        """Return the values of all runs so far."""
        values = {key: np.concatenate(found) for key, found in self._found.items()}
        facts = {key: facts for key, facts in self._facts.items() if key in values}
        first = last_before_layers(values) if self._has_states else None
        if first is not None:
            values[START] = values[first]
        last = next((key for key in ("output.softcap", "output") if key in values), None)
        if last is not None:
            values[LOGITS] = values.pop(last)
            facts[LOGITS] = facts.pop(last)
        return StepRecord(values, facts)


def last_before_layers(keys: Iterable[str]) -> str | None:
    """Return the last of ``keys``, in the plan's order, before those of layer 0: its step wrote the
    states before the first layer. None without such a key.
    """
    before = None
    for key in keys:
        if key.startswith("L0"):
            return before
        before = key
    return None


def split(point: HookPoint, step: Step | None) -> Iterator[tuple[str, StepFacts, slice | None]]:
    """Yield (key, facts, columns) for each product that ``step``, the step of a hook point,
    computed. ``columns``: its slice of the last axis, None for all. ``step`` None: the values are
    no step's, and the label is the key.
    """
    label = point.label
    if step is None or is_state(label):
        yield label, StepFacts(label), None
        return
    facts = facts_of(point, step)
    parts = point.rows.parts
    if not parts:
        yield label, facts, None
        return
    stem = label.rpartition(".")[0]
    for weight, (part, columns) in zip(facts.weights, parts.items(), strict=True):
        yield (
            f"{stem}.{part}",
            StepFacts(label, part, (weight,), facts.source, facts.adds),
            columns,
        )


def facts_of(point: HookPoint, step: Step) -> StepFacts:
    """Return the facts about the step of a hook point."""
    args = step.args
    spec: Any = step.spec
    weights = tuple(tensors_in(list(args.values())))
    packed = 32
    if isinstance(point.rows, PackedRows):
        layout = point.rows.layout
        packed = 8 * layout.row_bytes // layout.k
    is_norm = spec.name.startswith("norm")
    adds = args.get("residual") is not None or getattr(spec, "add", False)
    source = getattr(args.get("x"), "name", "")
    return StepFacts(point.label, "", weights, source, bool(adds), is_norm, packed)


def tensors_in(value: object) -> Iterator[str]:
    """Yield the names of the model's matrices and norms in ``value``, a step's arguments."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(name := getattr(value, "name", None), str):
        stem = name.partition(":")[0]  # of a norm: its name and its type in memory
        if stem.endswith(".weight"):
            yield stem


def record(
    model: Model, ids: Sequence[int], aligned: Mapping[str, Floats] | None = None
) -> StepRecord:
    """Run the text ``ids``, and return the values that every step wrote. ``aligned``: as of
    ``StepRecorder``.
    """
    recorder = StepRecorder(model, aligned)

    first = 0 if model.config.main_output == LOGITS else None
    read_text(model, list(ids), recorder, first)
    return recorder.record()


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepDifference:
    """The difference of two models in the values of one ``key``: a step's label, or one of the
    products that the step computes (``L0.attn.q`` of ``L0.attn.qkv``).

    ``error``, ``own``: the relative error (defined at the top of this module) in the free run and
    in the aligned run, None without an aligned one. ``tolerance``: the largest relative error that
    is not a difference. ``label``: of the step; ``part``: the product's name in it ("q"), "" if it
    is the whole step. ``worst_token``: index of the token with the largest error in the free run.
    """

    key: str
    label: str
    part: str
    layer: int  # -1 before the first, n_layer after the last
    error: float
    own: float | None
    tolerance: float
    worst_token: int

    @property
    def judged(self) -> float:
        """The error that is compared with the tolerance: ``own`` or, without an aligned run,
        ``error``.
        """
        return self.error if self.own is None else self.own

    @property
    def differs(self) -> bool:
        """Whether the error is beyond the tolerance; True for NaN."""
        return not self.judged <= self.tolerance


@dataclass(frozen=True)
class ModelDifference:
    """The result of a comparison: ``steps`` in the order of the plan.

    missing: keys that only one of the models has. same_top: number of tokens, of ``n_tokens``,
    after which both have the same likeliest next token; None without logits. aligned: whether the
    models ran a second time, in which every layer began with the reference's states
    (``StepDifference.own`` is from that run).
    """

    steps: tuple[StepDifference, ...]
    missing: tuple[str, ...]
    n_tokens: int
    same_top: int | None = None
    aligned: bool = True

    @property
    def first(self) -> StepDifference | None:
        """The first step that differs by more than its tolerance; None if none does."""
        return next((step for step in self.steps if step.differs), None)

    @property
    def jumps(self) -> tuple[StepDifference, ...]:
        """All steps that differ by more than their tolerance. After a step with a large error,
        later steps of the same layer are allowed errors as large.
        """
        return tuple(step for step in self.steps if step.differs)

    def layer(self, number: int) -> list[StepDifference]:
        """Return the steps of layer ``number``; -1 for those before the first layer, ``n_layer``
        for those behind the last.
        """
        return [step for step in self.steps if step.layer == number]


def compare(
    model: Model,
    ids: Sequence[int],
    reference: StepRecord,
    *,
    tensors: Mapping[str, Tensor],
    tolerance: float | None = None,
    free: StepRecord | None = None,
) -> ModelDifference:
    """Compare the steps of ``model`` for ``ids`` with ``reference``, a record of another model,
    whose weights are ``tensors`` by name.

    tolerance: one for all steps in place of the derived ones (None). free: a record of the model's
    free run, None to make one.
    """
    free = record(model, ids) if free is None else free
    states = {key: rows for key, rows in reference.values.items() if is_state(key)}
    aligned = record(model, ids, states) if states else None
    comparison = StepComparison(model, tensors, reference, free, aligned, tolerance)
    return comparison.result(len(ids))


def is_state(key: str) -> bool:
    """Return whether a key means states between layers: ``L5`` (after layer 5), or START (before
    the first layer).
    """
    return key == START or (key.startswith("L") and key[1:].isdigit())


def check_alike(model: Model, reference: Model) -> None:
    """Raise UnsupportedError unless ``model`` and ``reference`` have the same vocabulary size,
    number of layers and width.
    """
    a = model.config
    b = reference.config
    for what, unit, n, m in (
        ("vocabularies", "tokens", a.n_vocab, b.n_vocab),
        ("numbers of layers", "layers", a.n_layer, b.n_layer),
        ("widths", "values in each state", a.n_embd, b.n_embd),
    ):
        if n != m:
            found = f"{model.path} has {n} {unit}, {reference.path} {m}"
            raise UnsupportedError(f"different {what}: {found}: their steps cannot be compared")


def ids_of(model: Model, reference: Model | None, text: str, most: int) -> list[int]:
    """Return the first ``most`` token ids of a text; random ones for a model without a tokenizer.
    Raises TreadleError if ``model`` and ``reference`` (None: not checked) tokenize the text
    differently.
    """
    try:
        ids = model.tokenize(text)[:most]
        others = ids if reference is None else reference.tokenize(text)[:most]
    except UnsupportedError:
        drawn: list[int] = np.random.default_rng(0).integers(0, model.config.n_vocab, most).tolist()
        return drawn
    if not ids:
        raise TreadleError("the text has no tokens")
    if ids != others:
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
            min(len(ids), len(others)),
        )
        found = [f"{each[at]}" if at < len(each) else "the end" for each in (ids, others)]
        assert reference is not None
        raise TreadleError(
            f"different vocabularies: token {at} of the text is {found[0]} for {model.path}, "
            f"{found[1]} for {reference.path}"
        )
    return ids


class StepComparison:
    """Compares the records of two models, key by key, in the order of the model's plan.
    ``reference``: the other model's record, ``tensors``: its weights by name; ``free``,
    ``aligned``: the model's records in the free and the aligned run (None: there was none);
    ``tolerance``: one for all steps, None for derived ones.
    """

    def __init__(
        self,
        model: Model,
        tensors: Mapping[str, Tensor],
        reference: StepRecord,
        free: StepRecord,
        aligned: StepRecord | None,
        tolerance: float | None,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._reference = reference
        self._free = free
        self._aligned = aligned
        self._tolerance = tolerance
        self._rounding: dict[tuple[str, ...], float] = {}

    def result(self, n_tokens: int) -> ModelDifference:
        """Return the comparison of all keys that both records have, for a text of ``n_tokens``."""
        a = self._reference
        b = self._free
        steps = []
        layer = -1
        before = 0.0  # the largest error in this layer so far
        for key in b.values:
            if key == START or key not in a or a.values[key].size != b.values[key].size:
                continue
            number = self._layer_of(key)
            if number != layer and self._aligned is not None:
                before = 0.0
            layer = number
            errors = self._errors(key, layer, b)
            own = None
            if self._aligned is not None and key in self._aligned:
                own = middle_of(key, self._errors(key, layer, self._aligned))
            error = middle_of(key, errors)
            allowed = self._tolerance
            if allowed is None:
                growth = GROWTH_ATTENTION if key.endswith(".attn") else GROWTH
                allowed = growth * max(before, self._rounding_of(key), FLOOR)
            facts = b.facts[key]
            worst = int(np.nanargmax(errors)) if np.isfinite(errors).any() else 0
            step = StepDifference(key, facts.label, facts.part, layer, error, own, allowed, worst)
            before = max(before, step.judged)
            steps.append(step)
        missing = tuple(sorted(set(a.values) ^ set(b.values)))
        return ModelDifference(
            tuple(steps), missing, n_tokens, self._same_top(), self._aligned is not None
        )

    def _layer_of(self, key: str) -> int:
        head = key.partition(".")[0]
        if head.startswith("L") and head[1:].isdigit():
            return int(head[1:])
        return -1 if "embd" in head or head == "token_types" else self._model.config.n_layer

    def _errors(self, key: str, layer: int, b: StepRecord) -> npt.NDArray[np.float64]:
        """Return the relative error of each token's row of ``key``, float64 ``[n_tokens]``, of
        record ``b`` against the reference. In a layer, rows of queries and keys are first brought
        into the same order (``RowOrder``).
        """
        rows = self._reference.values[key]
        others = b.values[key]
        n = len(rows)
        errors = relative(rows.reshape(n, -1), others.reshape(n, -1))
        if not 0 <= layer < self._model.config.n_layer:
            return errors
        if key.endswith(QUERIES):
            order = RowOrder.best(self._model, layer, rows, others)
            return relative(rows.reshape(n, -1), order(others).reshape(n, -1))
        return errors

    def _rounding_of(self, key: str) -> float:
        """Return the largest relative rounding of the step of ``key``: of its weights on both
        sides, if these differ, and of its packed input or result.
        """
        facts = self._free.facts[key]
        packed = min(
            of.facts[name].packed
            for of in (self._free, self._reference)
            for name in (key, facts.source)
            if name in of.facts
        )
        weights = self._rounding.get(facts.weights)
        if weights is None:
            weights = self._rounding[facts.weights] = self._rounding_of_weights(facts.weights)
        return max(weights, activation_rounding(packed))

    def _rounding_of_weights(self, names: Iterable[str]) -> float:
        most = 0.0
        for name in names:
            tensor = self._model.gguf.tensors.get(name)
            other = self._tensors.get(name)
            if tensor is not None and other is not None and not equal(tensor, other):
                most = max(most, rounding(tensor), rounding(other))
        return most

    def _same_top(self) -> int | None:
        if LOGITS not in self._free or LOGITS not in self._reference:
            return None
        a = self._reference.values[LOGITS]
        b = self._free.values[LOGITS]
        return int((a.argmax(-1) == b.argmax(-1)).sum()) if a.shape == b.shape else None


def relative(rows: npt.ArrayLike, others: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the relative error |others - rows| / |rows| of each row, float64 ``[n_rows]``; 0 if
    both rows are 0, infinity if only that of ``rows`` is.
    """
    a = np.asarray(rows, np.float64)
    b = np.asarray(others, np.float64)
    error = np.sqrt(((b - a) ** 2).sum(-1))
    size = np.sqrt((a**2).sum(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where((error == 0) & (size == 0), 0.0, error / size))


def middle_of(key: str, errors: npt.NDArray[np.float64]) -> float:
    """Return the root mean square of the ``errors`` of a key's tokens. For the weights of routed
    experts (keys that end in ``.route``) return the median: a token whose scores are nearly equal
    gets other experts by any rounding.
    """
    if key.endswith(".route"):
        return float(np.median(errors))
    return float(np.sqrt(np.mean(errors**2)))


def rounding(tensor: Tensor) -> float:
    """Return the relative rounding of a tensor's format. For floats it is half a unit in the last
    place; for quantised weights 2^(1 - bits per weight), within a factor of 2 of that of normally
    distributed ones.
    """
    name = tensor.type_name
    if name in MANTISSA:
        return 2.0 ** -MANTISSA[name]
    n = int(np.prod(tensor.shape))
    return float(2.0 ** (1 - 8 * tensor.n_bytes / max(n, 1)))


def activation_rounding(bits: int) -> float:
    """Return the relative rounding of packed activations with ``bits`` per value; 0 for float32
    (32). With 8 bits a block has one scale, and its largest value may be ten times the root mean
    square.
    """
    if bits >= 32:
        return 0.0
    return 2.0**-6 if bits < 16 else 2.0**-8


def equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    if tensor.type_name != other.type_name or tensor.shape != other.shape:
        return False
    pairs = zip(tensor.arrays, other.arrays, strict=True)
    return all(a is b or np.array_equal(a, b) for a, b in pairs)


@dataclass(frozen=True)
class RowOrder:
    """A permutation of the dims of each head: ``dims`` are their indexes, for heads of ``head_dim``
    values; () keeps the order. Call it with values ``[n_tokens, n_head * head_dim]`` to permute
    them.

    RoPE of GGUF's llama rotates neighbouring dims, that of Hugging Face the two halves of a head.
    So the rows of their query and key matrices have different orders.
    """

    head_dim: int = 0
    dims: tuple[int, ...] = field(default=())

    def __call__(self, values: Floats) -> Floats:
        if not self.dims:
            return values
        heads = values.reshape(len(values), -1, self.head_dim)
        return heads[..., list(self.dims)].reshape(values.shape)

    @classmethod
    def best(cls, model: Model, layer: int, rows: Floats, others: Floats) -> RowOrder:
        """Return the order of ``others`` that brings them nearest to ``rows``, both queries or both
        keys of ``layer``: a permutation if it halves the error, else the unchanged order.
        """
        n = len(rows)
        head_dim = model.config.layers[layer].head_dim
        width = rows.reshape(n, -1).shape[-1]
        same = cls()
        if not head_dim or width % head_dim:
            return same

        def error(order: RowOrder) -> float:
            return float(np.mean(relative(rows.reshape(n, -1), order(others).reshape(n, -1))))

        table = model.config.layers[layer].rope
        n_rot = head_dim if table is None else 2 * model.config.ropes[table].n_pairs
        other = min((cls(head_dim, dims) for dims in orders(head_dim, n_rot)), key=error)
        return other if error(other) < error(same) / 2 else same


def orders(head_dim: int, n_rot: int) -> Iterator[tuple[int, ...]]:
    """Yield two permutations of a head's ``head_dim`` dims, which move only the first ``n_rot``:
    neighbours to halves, and back.
    """
    dims = np.arange(n_rot)
    rest = tuple(range(n_rot, head_dim))
    yield (*(int(i) for i in dims.reshape(-1, 2).T.ravel()), *rest)
    yield (*(int(i) for i in dims.reshape(2, -1).T.ravel()), *rest)
