"""Reference values by transformers, for a comparison step by step (``api/step_diff.py``).

A label's step reads tensors. Each has a name in the Hugging Face folder, which names a module. So
that module's output is what the step, a product or a norm, wrote; its input is what the step before
it wrote. States between layers are transformers' ``hidden_states``; rotated queries and attention's
results are taken at transformers' call of attention.

Tensors that treadle makes from others (fused, split, reordered) have no module: their labels are
not compared, but the states behind them are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.api.step_diff import (
    LOGITS,
    START,
    StepFacts,
    StepRecord,
    compare,
    is_state,
    last_before_layers,
    record,
)
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.splits import is_hf

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.api.step_diff import ModelDifference

Floats = npt.NDArray[np.float32]
Found = dict[str, Floats]


def load_transformers(folder: Path) -> Any:
    """Load the model of a Hugging Face folder with transformers, in float32, and return its module.
    Raises TreadleError if that fails, UnsupportedError without torch and transformers.
    """
    if not is_hf(folder):
        found = "is no Hugging Face folder"
        raise TreadleError(f"{folder}: {found}: expected one for a reference by transformers")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"a reference by transformers needs torch and transformers ({error}): without them "
            "leave out --reference, and treadle reads the folder itself"
        ) from None
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    except Exception as error:  # of many kinds, from a folder's own settings
        why = str(error).partition("\n")[0]
        raise TreadleError(f"{folder}: transformers cannot load it: {why}") from error


def reference_of(
    network: Any, folder: Path, model: Model, facts: Mapping[str, StepFacts], ids: Sequence[int]
) -> StepRecord:
    """Return a record of what transformers' ``network`` computes for ``ids``. ``facts``: of
    ``model``'s steps, by the keys to record; ``folder``: the network's, whose tensor names give the
    modules.
    """
    import torch

    found: Found = {}
    with ExitStack() as stack:
        stack.enter_context(record_attention(network, model, found))
        for module, wanted in modules_of(network, folder, model, facts).items():
            stack.enter_context(hooked(module, wanted, found))
        with torch.no_grad():
            made = network(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    n_layer = model.config.n_layer
    states = getattr(made, "hidden_states", None) or ()
    if len(states) == n_layer + 1:
        for i, rows in enumerate(states[:-1]):  # the last one is normed
            found[f"L{i - 1}" if i else START] = rows_of(rows)
        if (first := last_before_layers(facts)) is not None:
            found[first] = found[START]
    if (last := found.pop(LAST, None)) is not None:
        found[f"L{n_layer - 1}"] = last
    found[LOGITS] = rows_of(made.logits)
    return StepRecord(scaled(found, model, facts), {})


def scaled(found: Found, model: Model, facts: Mapping[str, StepFacts]) -> Found:
    """Return the values ``found``, by key, as treadle's plan has them: the residual stream is
    divided by the model's ``residual_scale``. The last norm is left out if the plan multiplies it
    by a logit scale, and so are keys that are neither states nor in ``facts``.
    """
    config = model.config
    kept = dict(found)
    if config.logit_scale != 1.0:
        kept.pop("output_norm", None)
    if config.residual_scale != 1.0:
        for key in kept:
            of = facts.get(key)
            if is_state(key) or key == "token_embd" or (of is not None and of.adds):
                kept[key] = kept[key] / np.float32(config.residual_scale)
    return {key: rows for key, rows in kept.items() if key in facts or is_state(key)}


LAST = "input of output_norm"  # key of the states after the last layer, until they have their own


def modules_of(
    network: Any, folder: Path, model: Model, facts: Mapping[str, StepFacts]
) -> dict[Any, list[tuple[str, str]]]:
    """Return the modules of ``network`` whose inputs or outputs are recorded. Each has pairs: "in"
    or "out", and the key under which that value is recorded. ``facts``: of the model's steps, by
    key; keys without a module are left out. ``folder``: the network's, with its tensor names.
    """
    names = hf_names(folder)
    modules = dict(network.named_modules())
    wanted: dict[Any, list[tuple[str, str]]] = {}
    for key, of in facts.items():
        if len(of.weights) != 1 or of.weights[0] not in names:
            continue
        module = modules.get(names[of.weights[0]].rpartition(".")[0])
        if module is None:
            continue
        pairs = wanted.setdefault(module, [])
        if not key.startswith("token_embd") and key != LOGITS and not of.adds:
            pairs.append(("out", key))
        if of.source in facts:
            pairs.append(("in", of.source))
        if key == "output_norm":
            pairs.append(("in", LAST))
    return wanted


def hf_names(folder: Path) -> dict[str, str]:
    """Return the tensor names of the checkpoint in ``folder`` by GGUF's names, for tensors whose
    rows are the same in both.
    """
    from treadle.convert.hf.folder import read_checkpoint

    tensors = read_checkpoint(folder).tensors
    return {
        name: mapped.tensor.name
        for name, mapped in tensors.items()
        if mapped.layout is None and mapped.shape == tuple(mapped.tensor.shape)
    }


@contextmanager
def hooked(module: Any, wanted: Sequence[tuple[str, str]], found: Found) -> Iterator[None]:
    """Within the block, store a module's inputs and outputs in ``found``, of several calls those of
    the first. ``wanted``: pairs of "in" or "out" and the key under which to store it.
    """

    def keep(module: Any, given: tuple[Any, ...], made: Any) -> None:
        for kind, key in wanted:
            if key in found:
                continue
            rows = given[0] if kind == "in" else output_of(module, given[0], made)
            if rows is not None:
                found[key] = rows_of(rows)

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def record_attention(network: Any, model: Model, found: Found) -> Iterator[None]:
    """Within the block, store in ``found`` each layer's rotated and scaled queries, and attention's
    results. For that, ``eager_attention_forward`` in the modules of transformers' classes is
    replaced.
    """
    changed: dict[Any, Any] = {}

    def kept(attend: Any) -> Any:
        def attend_and_keep(module: Any, query: Any, *given: Any, **settings: Any) -> Any:
            made = attend(module, query, *given, **settings)
            i = getattr(module, "layer_idx", None)
            scale = settings.get("scaling")
            if i is None or scale is None or model.config.layers[i].latent is not None:
                return made
            at = f"L{i}.attn"
            found.setdefault(f"{at}.rope", rows_of(query.transpose(1, 2) * scale))
            found.setdefault(at, rows_of(made[0]))
            return made

        return attend_and_keep

    try:
        for module in network.modules():
            file = sys.modules[type(module).__module__]
            attend = getattr(file, "eager_attention_forward", None)
            if attend is not None and file not in changed:
                changed[file] = attend
                vars(file)["eager_attention_forward"] = kept(attend)
        yield
    finally:
        for file, attend in changed.items():
            vars(file)["eager_attention_forward"] = attend


def output_of(module: Any, given: Any, made: Any) -> Any:
    """Return the tensor that a module made, ``made``. A router of experts makes a tuple instead;
    then its scores are computed from its input ``given``, weight and bias. None for other modules
    that make a tuple.
    """
    if not isinstance(made, tuple):
        return made
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or weight.shape[-1] != given.shape[-1]:
        return None
    scores = given @ weight.T.to(given.dtype)
    bias = getattr(module, "bias", None)
    return scores if bias is None else scores + bias


def rows_of(tensor: Any) -> Floats:
    """Return a tensor ``[1, token, ...]`` or ``[token, ...]`` as float32 rows of tokens."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array[0] if array.ndim >= 3 and len(array) == 1 else array


def compare_with(
    model: Model,
    network: Any,
    folder: Path,
    ids: Sequence[int],
    *,
    tolerance: float | None = None,
) -> ModelDifference:
    """Compare a model's steps for ``ids`` with the values that transformers' ``network`` of
    ``folder`` computes. ``tolerance``: one for all steps, None for derived ones.

    Raises UnsupportedError for another vocabulary size or number of layers.
    """
    from treadle.convert.open import open_model

    config = getattr(network.config, "text_config", None) or network.config
    for what, n, m in (
        ("vocabularies", model.config.n_vocab, config.vocab_size),
        ("numbers of layers", model.config.n_layer, config.num_hidden_layers),
    ):
        if n != m:
            found = f"{model.path} has {n}, {folder} {m}"
            raise UnsupportedError(f"different {what}: {found}: their steps cannot be compared")
    free = record(model, ids)
    reference = reference_of(network, folder, model, free.facts, ids)
    with open_model(folder) as weights:
        tensors = weights.tensors
        return compare(model, ids, reference, tensors=tensors, tolerance=tolerance, free=free)
