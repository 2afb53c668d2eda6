"""Hooks of ``Model``: traces and patches of steps, states, attention weights, logit lens.

Labels are those of the plan's steps (``treadle plan``), and "L5" for the states after layer 5.
Layers count from 0, so these are the states with the number 6: number 0 is before the first layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.validate import integer, token_ids
from treadle.engine.hooks import Call, Hook, HookedRun
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.relative_logits import relative_values
from treadle.kernels.attention.weights_ref import attention_weights
from treadle.kvcache.page_pool import FREED
from treadle.plan.hook_rows import FloatRows, HookPoint, StepRows, state_rows

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.hooks import EngineHooks
    from treadle.kvcache.cache import Sequence as CachedSequence
    from treadle.kvcache.page_pool import Pool
    from treadle.kvcache.prefix_tree import Lora
    from treadle.plan.plan import Plan, Step

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]
PatchFunction = Callable[..., "npt.ArrayLike | None"]


@dataclass(frozen=True, eq=False)
class StepValues:
    """The values that the steps of one label wrote: ``values`` float32, a row for each token.

    axes: a name for each dimension, such as ("token", "embd"), ("token", "head", "dim") or
    ("output", "vocab"). tokens, positions, sequences: for each row, the token's id, its index in
    its sequence, and the sequence's number. parts: slices of the last axis by name, such as "q",
    "k" and "v", where several products lie side by side.

    ``numpy.asarray`` gives the values.
    """

    label: str
    values: Floats
    axes: tuple[str, ...]
    tokens: Ints
    positions: Ints
    sequences: Ints
    parts: Mapping[str, slice] = field(default_factory=dict)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if dtype is None and not copy:
            return self.values
        return np.array(self.values, dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        sizes = zip(self.axes, self.values.shape, strict=True)
        return f"StepValues({self.label}, {', '.join(f'{name}={n}' for name, n in sizes)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``values``."""
        return self.values.shape

    def part(self, name: str) -> Floats:
        """Return the columns of one product, such as "q": the part of the last axis that ``parts``
        names. Raises TreadleError if there is no such part.
        """
        if name not in self.parts:
            has = ", ".join(self.parts) or "none"
            raise TreadleError(f"{self.label}: no part {name!r}: its parts are {has}")
        return self.values[..., self.parts[name]]

    def sequence(self, number: int) -> StepValues:
        """Return a StepValues with the rows of sequence ``number``."""
        return self._rows(self.sequences == number)

    def _rows(self, keep: np.ndarray) -> StepValues:
        of_rows = self.tokens[keep], self.positions[keep], self.sequences[keep]
        return StepValues(self.label, self.values[keep], self.axes, *of_rows, self.parts)


class TracedRun(Mapping[str, StepValues]):
    """The values that the traced steps wrote in one run of the engine: a mapping from label to
    ``StepValues``.

    tokens, positions, sequences: for each row of the run, rejected drafts included, the token's id,
    its index in its sequence, and the sequence's number.
    """

    def __init__(self, run: HookedRun) -> None:
        self.tokens = run.tokens
        self.positions = run.positions
        self.sequences = run.sequences
        self._values: dict[str, StepValues] = {}
        self._token_rows: dict[str, Ints | slice] = {}
        self._kept = np.ones(len(self.tokens), bool)

    def __getitem__(self, label: str) -> StepValues:
        return self._values[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"TracedRun({len(self.tokens)} tokens, {', '.join(self) or 'nothing'})"

    def add(self, run: HookedRun, point: HookPoint) -> None:
        """Read and keep the values that the step of ``point`` wrote in ``run``."""
        self._values[point.label] = values_at(run, point)
        self._token_rows[point.label] = run.rows_of(point.rows.count)

    def drop(self, number: int, position: int) -> None:
        """Mark the rows of sequence ``number`` from ``position`` on as dropped: its text does not
        have these tokens.
        """
        self._kept &= (self.sequences != number) | (self.positions < position)

    def kept(self, label: str) -> StepValues:
        """Return the values of a label without dropped rows."""
        values = self._values[label]
        return values if self._kept.all() else values._rows(self._kept[self._token_rows[label]])


def values_at(run: HookedRun, point: HookPoint) -> StepValues:
    """Return the values that the step of ``point`` wrote in ``run``, which is at that step."""
    rows = point.rows
    which = run.rows_of(rows.count)
    of_rows = (run.tokens[which], run.positions[which], run.sequences[which])
    return StepValues(point.label, run.read(rows), rows.axes, *of_rows, rows.parts)


class Trace(Hook):
    """Context manager of ``Model.trace``: collects what steps write while it is entered, in every
    run of the model.

    ``t["L5.ffn.down"]`` has the rows of all runs. ``labels``: those that its patterns match.
    ``runs``: a ``TracedRun`` for each run, in order.
    """

    def __init__(self, hooks: EngineHooks, patterns: Sequence[str]) -> None:
        self.labels: tuple[str, ...] = tuple(find_labels(hooks, patterns))
        self.runs: list[TracedRun] = []
        self._hooks = hooks
        self._patterns = frozenset(self.labels)
        self._run: TracedRun | None = None
        self._entered: Any = None

    def __enter__(self) -> Trace:
        if self._entered is not None:
            raise TreadleError("this trace is in use: make another one")
        self._entered = self._hooks.using(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        entered, self._entered = self._entered, None
        entered.__exit__(*error)

    def __contains__(self, label: object) -> bool:
        return any(label in run for run in self.runs)

    def __getitem__(self, label: str) -> StepValues:
        """Return the rows of all runs, in order, without those of rejected drafts. Raises
        TreadleError for a label that was not traced or that no run had.
        """
        if label not in self.labels:
            raise TreadleError(f"{label!r} was not traced: traced are {', '.join(self.labels)}")
        found = [run.kept(label) for run in self.runs if label in run]
        if not found:
            raise TreadleError(f"{label!r}: no run had this step while the trace was entered")
        if len(found) == 1:
            return found[0]
        return StepValues(
            label,
            np.concatenate([each.values for each in found]),
            found[0].axes,
            np.concatenate([each.tokens for each in found]),
            np.concatenate([each.positions for each in found]),
            np.concatenate([each.sequences for each in found]),
            found[0].parts,
        )

    def __repr__(self) -> str:
        return f"Trace({', '.join(self.labels)}; {len(self.runs)} runs)"

    def clear(self) -> None:
        """Drop the runs that were collected so far."""
        self.runs.clear()

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        for point in points:
            if point.label in self._patterns and not point.is_copy:
                yield point.end, self._collector(point)

    def _collector(self, point: HookPoint) -> Call:
        def collect(run: HookedRun) -> None:
            if self._run is not None and run.count(point.rows.count):
                self._run.add(run, point)

        return collect

    def is_hooked(self, label: str) -> bool:
        return label in self._patterns

    def begin(self, run: HookedRun) -> None:
        self._run = TracedRun(run)

    def end(self, run: HookedRun) -> None:
        if self._run is not None and self._run:
            for number, start in zip(run.numbers, run.starts, strict=True):
                self._drop(number, start)  # computed again
            self.runs.append(self._run)
        self._run = None

    def truncated(self, number: int, n: int) -> None:
        if n:  # 0: its text has ended
            self._drop(number, n)

    def _drop(self, number: int, position: int) -> None:
        """Drop the rows of sequence ``number`` from ``position`` on, whose tokens were rejected:
        from the last run back to the first without such rows.
        """
        for run in reversed(self.runs):
            own = run.positions[run.sequences == number]
            if len(own):
                if own[-1] < position:
                    break
                run.drop(number, position)


class Patch(Hook):
    """Hook that changes the values that steps write while it is entered. ``functions``: by label,
    as of ``Model.patch``.
    """

    changes = True

    def __init__(self, hooks: EngineHooks, functions: Mapping[str, PatchFunction]) -> None:
        self._functions: dict[str, list[Callable[[StepValues], npt.ArrayLike | None]]] = {}
        for pattern, function in functions.items():
            called = as_patch(pattern, function)
            for label in find_labels(hooks, [pattern]):
                self._functions.setdefault(label, []).append(called)
        self._changed: dict[str, Floats] = {}  # in the current run, by label

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        for point in points:
            if point.label in self._functions:
                yield point.end, self._writer(point)

    def _writer(self, point: HookPoint) -> Call:
        def write(run: HookedRun) -> None:
            if not run.count(point.rows.count):
                return
            if not point.is_copy:
                self._changed[point.label] = self._apply(values_at(run, point))
            run.write(point.rows, self._changed[point.label])

        return write

    def _apply(self, values: StepValues) -> Floats:
        """Call the functions of a label on ``values``; return the changed array. Raises
        TreadleError for a result of another shape.
        """
        for function in self._functions[values.label]:
            made = function(values)
            if made is None:  # changed in place
                continue
            changed = np.asarray(made, np.float32)
            if changed.shape != values.shape:
                found = f"returned an array of shape {list(changed.shape)}"
                raise TreadleError(
                    f"the patch of {values.label} {found}: expected {list(values.shape)} "
                    f"({', '.join(values.axes)})"
                )
            values.values[...] = changed
        return values.values

    def is_hooked(self, label: str) -> bool:
        return label in self._functions

    def begin(self, run: HookedRun) -> None:
        self._changed.clear()


def as_patch(pattern: str, function: PatchFunction) -> Callable[[StepValues], npt.ArrayLike | None]:
    """Return a function of one argument, the ``StepValues``, that calls ``function`` with their
    array, and with the StepValues if it has a second parameter without a default. ``pattern``: its
    labels, for errors. Raises TreadleError for what is not callable.
    """
    if not callable(function):
        found = type(function).__name__
        raise TreadleError(f"the patch of {pattern!r} is {found}: expected a function")
    try:
        given = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = sum(each.kind in kinds and each.default is each.empty for each in given)
    except ValueError:  # of a function in C
        needed = 1
    if needed > 1:
        return lambda values: function(values.values, values)
    return lambda values: function(values.values)


def find_labels(hooks: EngineHooks, patterns: Sequence[str]) -> list[str]:
    """Return the labels that match any of the patterns, in the order of the steps. A pattern that
    matches none of the usual steps may match steps that only some texts have
    (``HookedEngine.labels`` with ``every``). Raises TreadleError, with similar labels, for one that
    matches none.
    """
    if not patterns:
        raise TreadleError("no label: give at least one, such as 'L5.ffn.down' or 'L*.attn'")
    usual = known = hooks.labels()
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TreadleError(f"label {pattern!r:.40}: expected a text")
        found = [label for label in usual if fnmatchcase(label, pattern)]
        if not found:
            known = hooks.labels(every=True)
            found = [label for label in known if fnmatchcase(label, pattern)]
        if not found:
            from difflib import get_close_matches

            near = get_close_matches(pattern, known, n=3, cutoff=0.4)
            hint = f"near: {', '.join(near)}" if near else "`treadle plan` shows the steps"
            raise TreadleError(f"no step to hook has the label {pattern!r}: {hint}")
        chosen.update(found)
    return [label for label in known if label in chosen]


@contextmanager
def patched(
    hooks: EngineHooks, functions: Mapping[str, PatchFunction]
) -> Generator[None, None, None]:
    """Apply patches to the runs of the engine of ``hooks`` within the block. ``functions``: by
    label, as of ``Model.patch``.
    """
    with hooks.using(Patch(hooks, functions)):
        yield


# -- states ----------------------------------------------------------------------------------------


def chosen_layers(layers: Sequence[int] | str | None, n_layer: int) -> list[int]:
    """Return the chosen numbers of states between layers, from 0 (before the first layer) to
    ``n_layer``; negative ones count from the end, None and "all" mean all. Raises TreadleError for
    other values.
    """
    if layers is None or layers == "all":
        return list(range(n_layer + 1))
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TreadleError(f"layers={layers!r:.40}: expected a list of numbers, or 'all'")
    found = []
    for given in layers:
        number = integer("layers", given)
        if not -n_layer - 1 <= number <= n_layer:
            expected = f"0 (before the first layer) to {n_layer}, or negative from the end"
            raise TreadleError(f"layers: {number}: expected {expected}")
        found.append(number % (n_layer + 1))
    return found


def states_of(plan: Plan, n_embd: int, model: str) -> list[tuple[int, StepRows]]:
    """Return for each state between layers of a plan, from 0 (before the first layer) on: the
    number of steps after which it is complete, and where its rows of ``n_embd`` values are.
    ``model``: a name for errors. Raises UnsupportedError for a graph whose layers pass on several
    streams of states.
    """
    if not plan.states:
        raise UnsupportedError(f"{model}: its layers pass on several streams of states")
    return [(end, state_rows(buffer, n_embd)) for end, buffer in plan.states]


class StateReader(Hook):
    """Hook that collects the states between layers, for the numbers ``layers`` (0: before the first
    layer, 5: after five layers).
    """

    stops_early = True

    def __init__(self, model: Model, layers: Sequence[int]) -> None:
        self._config = model.config
        self._layers = layers
        self._found: dict[int, list[Floats]] = {layer: [] for layer in layers}

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        states = states_of(plan, self._config.n_embd, self._config.arch.name)
        for layer, found in self._found.items():
            end, rows = states[layer]
            yield end, partial(self._keep, found, rows)

    def _keep(self, found: list[Floats], rows: StepRows, run: HookedRun) -> None:
        found.append(run.read(rows))

    def rows(self) -> Floats:
        """Return the states of all runs, float32 ``[n_layers, n_tokens, n_embd]``. A plan may keep
        them divided by the model's ``residual_scale``; here they are multiplied by it again.
        """
        rows = np.stack([np.concatenate(self._found[layer]) for layer in self._layers])
        scale = self._config.residual_scale
        return rows if scale == 1.0 else rows * np.float32(scale)


def layer_states(model: Model, ids: Sequence[int], layers: Sequence[int] | str) -> Floats:
    """Return the states between layers for the text ``ids``, float32 ``[n_layers, n_tokens,
    n_embd]``. ``layers``: as of ``Model.states``.
    """
    chosen = chosen_layers(layers, model.config.n_layer)
    (states,) = states_of_texts(model, [checked(ids)], chosen)
    return states


def states_of_texts(
    model: Model, texts: Sequence[list[int]], layers: Sequence[int], *, lora: Lora | None = None
) -> list[Floats]:
    """Return for each text the states with the numbers ``layers``, float32
    ``[n_layers, n_tokens, n_embd]``. Short texts share runs. ``lora``: the adapters and control
    vectors to run with, None for the model's defaults.

    Raises ContextFullError for a text that does not fit, UnsupportedError for a graph with several
    streams of states.
    """
    result: list[Floats] = []
    for group in model.engine.batches(texts):
        try:
            result += _states_of_run(model, group, layers, lora)
        except ContextFullError:
            if len(group) == 1:
                raise
            for ids in group:  # too many pages at once
                result += _states_of_run(model, [ids], layers, lora)
    return result


def _states_of_run(
    model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int], lora: Lora | None
) -> list[Floats]:
    """Return the states of texts that fit one run, or of a single text of any length; ``layers``,
    ``lora`` and the result as of ``states_of_texts``.
    """
    reader = StateReader(model, layers)
    with model.engine.lock:
        model.make_room(sum(map(len, texts)))
        with model.hooks.using(reader) as engine:
            if len(texts) == 1:
                engine.read_text(texts[0], lora=lora)
            else:
                engine.read_together(texts, lora=lora)
    ends = np.cumsum([len(ids) for ids in texts])
    return np.split(reader.rows(), ends[:-1], axis=1)


def checked(ids: Sequence[int]) -> list[int]:
    """Return token ids as a list. Raises TreadleError for an empty one."""
    found = token_ids(ids)
    if not found:
        raise TreadleError("no tokens")
    return found


def read_text(model: Model, ids: list[int], hook: Hook, first: int | None = None) -> None:
    """Run the text ``ids`` with a hook, in a new sequence. ``first``: compute logits of the tokens
    from this index on, None for none. No other thread's batches run meanwhile.
    """
    with model.engine.lock:
        model.make_room(len(ids))
        with model.hooks.using(hook) as engine:
            engine.read_text(ids, first)


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The attention weights of one layer over a text: ``weights`` float32
    ``[n_head, n_tokens, n_tokens]``, by head, query and key. ``numpy.asarray`` gives them.

    pieces: each token's text, or its id where the file has no vocabulary.
    """

    layer: int
    ids: list[int]
    weights: Floats
    pieces: list[str]
    axes: tuple[str, ...] = ("head", "query", "key")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if dtype is None and not copy:
            return self.weights
        return np.array(self.weights, dtype)

    def __getitem__(self, index: Any) -> Any:
        return self.weights[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``weights``."""
        return self.weights.shape

    def __repr__(self) -> str:
        n_head, n_tokens, _ = self.shape
        return f"AttentionWeights(layer {self.layer}, {n_head} heads, {n_tokens} tokens)"

    def _repr_html_(self) -> str:
        from treadle.api.hook_pictures import attention_picture

        return attention_picture(self)


class AttentionReader(Hook):
    """Hook that computes the attention weights of one layer, whose keys are in ``pool``: ``found``
    has an array, float32 ``[n_head, n_queries, n_keys]``, for each run.
    """

    stops_early = True

    def __init__(self, layer: int, pool: Pool) -> None:
        self._label = f"L{layer}"
        self._pool = pool
        self.found: list[Floats] = []

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        for i, step in enumerate(plan.steps):
            if isinstance(step.spec, Attention) and step.label.split(".")[0] == self._label:
                yield i, partial(self._compute, step)
                return

    def _compute(self, step: Step, run: HookedRun) -> None:
        spec = step.spec
        assert isinstance(spec, Attention)
        width = spec.n_head * spec.head_dim
        rows = FloatRows(step.args["qkv"], "n_tokens", ("token", "q"), (width,), ((0, width),))
        (part,) = run.parts
        page_of = page_reader(self._pool, part.seq, step)
        arrays = {name: step.args.get(name) for name in ("sinks", "distances")}
        given = {name: None if of is None else of.array for name, of in arrays.items()}
        if spec.rel_extent:
            width = spec.n_head * relative_values(spec.rel_extent)
            cells = (step.args["rel_logits"], "n_tokens", ("token", "rel_logit"), (width,))
            given["rel_logits"] = run.read(FloatRows(*cells, ((0, width),)))
        chunk = self._pool.chunk
        made = attention_weights(spec, run.read(rows), run.starts[0], page_of, chunk=chunk, **given)
        self.found.append(made)


def page_reader(pool: Pool, seq: CachedSequence, step: Step) -> Callable[[int], np.ndarray | None]:
    """Return a function that returns, for i, the bytes that the layer of ``step``, an attention
    step, has in the i-th page of ``seq`` in ``pool``; None for a page that is no longer kept.
    """
    pages = seq.pages[pool.index]
    offset = step.args["layer_off"]

    def read(i: int) -> np.ndarray | None:
        if pages[i] == FREED:
            return None
        at = pages[i] * pool.cell_bytes + offset
        return pool.const.memory.read(at, pool.layout.layer_bytes)

    return read


def attention(model: Model, ids: Sequence[int], layer: int) -> AttentionWeights:
    """Return the attention weights of a layer over the text ``ids``, as ``Model.attention``.
    Negative layers count from the end. Raises ContextFullError, UnsupportedError, TreadleError.
    """
    given = checked(ids)
    n_layer = model.config.n_layer
    number = integer("layer", layer)
    if not -n_layer <= number < n_layer:
        raise TreadleError(f"layer={number}: expected 0 to {n_layer - 1}, or negative")
    number %= n_layer
    source = model.config.layers[number].kv_from
    pool = next((each for each in model.engine.cache.pools if source in each.layers), None)
    if pool is None:
        mixer = model.config.layers[number].mixer or "nothing"
        raise UnsupportedError(f"layer {number} has no attention: its mixer is {mixer}")
    reader = AttentionReader(number, pool)
    read_text(model, given, reader)
    n = len(given)
    weights = np.zeros((len(reader.found[0]), n, n), np.float32)
    at = 0
    for found in reader.found:
        weights[:, at : at + found.shape[1], : found.shape[2]] = found
        at += found.shape[1]
    return AttentionWeights(number, given, weights, pieces_of(model, given))


def pieces_of(model: Model, ids: Iterable[int]) -> list[str]:
    """Return each token's text, or its id where the file has no vocabulary."""
    try:
        return [model.detokenize([id], special=True) for id in ids]
    except UnsupportedError:
        return [str(id) for id in ids]


# -- logit lens ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LensLogits:
    """The logits of states between layers: ``logits`` float32 ``[n_layers, n_tokens, n_vocab]``.
    ``numpy.asarray`` gives them.

    layers: the number of each state, from 0 (before the first layer) on. positions: the index in
    ``ids`` of each token with logits. piece_of: returns a token's text.
    """

    layers: list[int]
    ids: list[int]
    positions: list[int]
    logits: Floats
    piece_of: Callable[[int], str] = field(repr=False)
    axes: tuple[str, ...] = ("layer", "token", "vocab")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if dtype is None and not copy:
            return self.logits
        return np.array(self.logits, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``logits``."""
        return self.logits.shape

    @property
    def best(self) -> Ints:
        """The likeliest token id for each state, ``[n_layers, n_tokens]``."""
        best: Ints = self.logits.argmax(-1)
        return best

    def probabilities(self, token: int) -> Floats:
        """Return the probability of ``token`` for each state, float32 ``[n_layers, n_tokens]``."""
        top = self.logits.max(-1)
        total = np.exp(self.logits - top[..., None]).sum(-1, dtype=np.float64)
        return np.asarray(np.exp(self.logits[..., token] - top) / total, np.float32)

    def ranks(self, token: int) -> Ints:
        """Return how many tokens are likelier than ``token`` for each state,
        ``[n_layers, n_tokens]``.
        """
        return np.asarray((self.logits > self.logits[..., token, None]).sum(-1), np.intp)

    def __repr__(self) -> str:
        n_layers, n_tokens, _ = self.shape
        return f"LensLogits({n_layers} layers, {n_tokens} tokens)"

    def _repr_html_(self) -> str:
        from treadle.api.hook_pictures import lens_table

        return lens_table(self)


class LensReader(Hook):
    """Hook that computes logits of the states between layers: it writes each state in place of the
    last layer's, and runs the steps behind the last layer again.
    """

    stops_early = True

    def __init__(self, model: Model, layers: Sequence[int]) -> None:
        self._config = model.config
        self._layers = layers
        self._states: dict[int, Floats] = {}  # of the current run
        self.found: list[Floats] = []  # ``[n_layers, n_outputs, n_vocab]`` of each run

    def calls(self, plan: Plan, points: Sequence[HookPoint]) -> Iterable[tuple[int, Call]]:
        states = states_of(plan, self._config.n_embd, self._config.arch.name)
        for layer, (end, rows) in enumerate(states):
            if layer in self._layers:
                yield end, partial(self._keep, layer, rows)
        end, last = states[-1]
        logits = plan.outputs.get("logits")
        if logits is not None:
            written = [i for i, step in enumerate(plan.steps) if logits in step.writes]
            tail = range(end, written[-1] + 1)
            yield end, partial(self._compute, last, tail)

    def _keep(self, layer: int, rows: StepRows, run: HookedRun) -> None:
        which = run.rows_of("n_outputs")
        self._states[layer] = run.read(rows)[which]

    def _compute(self, last: StepRows, tail: range, run: HookedRun) -> None:
        ready = run.ready
        n = run.count("n_outputs")
        if not n:
            return
        final = run.read(last)
        which = run.rows_of("n_outputs")
        buffer = ready.plan.outputs["logits"]
        made = []
        for layer in self._layers:
            states = final.copy()
            states[which] = self._states[layer]
            run.write(last, states)
            run.engine.device.run(ready.program, tail)
            made.append(ready.rows(buffer, n, self._config.n_vocab).copy())
        run.write(last, final)
        self.found.append(np.stack(made))


def lens(
    model: Model,
    ids: Sequence[int],
    layers: Sequence[int] | str | None = None,
    positions: Sequence[int] | None = None,
) -> LensLogits:
    """Return the logits of states between layers for the text ``ids``; arguments as of
    ``Model.lens``.
    """
    given = checked(ids)
    n = len(given)
    wanted = list(range(n))
    if positions is not None:
        wanted = [integer("positions", each) for each in positions]
        if not wanted or any(not -n <= each < n for each in wanted):
            raise TreadleError(f"positions: expected indices of the {n} tokens, found {wanted!r}")
        wanted = [each % n for each in wanted]
    chosen = chosen_layers(layers, model.config.n_layer)
    reader = LensReader(model, chosen)
    first = min(wanted)
    read_text(model, given, reader, first)
    rows = np.concatenate(reader.found, axis=1)
    if wanted != list(range(first, n)):
        rows = rows[:, [each - first for each in wanted]]

    def piece_of(token: int) -> str:
        return pieces_of(model, [token])[0]

    return LensLogits(chosen, given, wanted, rows, piece_of)
