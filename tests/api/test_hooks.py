"""Hooks: what steps wrote, changes to it, states, attention and the logit lens, against
transformers and numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_granite_shared import CASE as GRANITE
from tests.convert.test_hf_mixtures import CASES as MIXTURES
from tests.convert.test_hf_mixtures import own
from tests.matrix_rounding import weight_rounding
from tests.models.hf_cases import ALL_CASES, ENCODER_CASES
from tests.models.hf_tiny import (
    N_TOKENS,
    N_VOCAB,
    build,
    float64_only,
    require_transformers,
    run,
    write_gguf,
)
from tests.tiny import rounding
from treadle.engine.engine import Engine
from treadle.kernels.activation_layout import WORD_TOP
from treadle.kvcache.cache import KVCache

Array = npt.NDArray[np.float64]
IDS: list[int] = np.random.default_rng(7).integers(3, N_VOCAB, N_TOKENS).tolist()
# Grouped queries; windows and caps; biases; parallel sums; norms after sums; experts; sinks; tokens
# that see later ones.
CASES = (
    "llama",
    "gemma3-softcap",
    "gpt2",
    "gptneox",
    "exaone4",
    "mixtral",
    "gpt-oss",
    "nomic-bert",
)


@dataclass(frozen=True)
class Reference:
    """A transformers model in float64, and the same as a file."""

    path: Path
    model: Any

    def compute(self) -> Any:
        return run(self.model, IDS, output_hidden_states=True, output_attentions=True)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Written when first asked for, and then kept."""
    require_transformers()
    folder = tmp_path_factory.mktemp("hooks")

    class References(dict[str, Reference]):
        def __missing__(self, case: str) -> Reference:
            path = folder / case
            if case in ALL_CASES:
                model = build(ALL_CASES[case])
                path = folder / f"{case}.gguf"
                write_gguf(ALL_CASES[case], model, path)
            elif case in ENCODER_CASES:
                model = build(ENCODER_CASES[case])
                path = folder / f"{case}.gguf"
                write_gguf(ENCODER_CASES[case], model, path)
            else:
                model = save(own(GRANITE if case == "granite" else MIXTURES[case]), path)
            self[case] = Reference(path, model)
            return self[case]

    return References()


def load(reference: Reference) -> treadle.Model:
    return treadle.load(reference.path, threads=2, kv="f32")


def ways(model: treadle.Model) -> dict[str, np.ndarray]:
    """Logits of every token, by plans for many tokens, for some, and for one."""
    found = {"whole": model.logits(IDS)}
    for chunk in (1, 13):
        model.engine.cache.forget()  # pages of another way are rounded otherwise
        with model.session() as session:
            parts = [session.logits(IDS[at : at + chunk]) for at in range(0, len(IDS), chunk)]
            found[f"chunks of {chunk}"] = np.concatenate(parts)
    return found


def assert_near(found: np.ndarray, expected: np.ndarray, share: float) -> None:
    error = np.abs(found - expected).max()
    assert error <= share * np.abs(expected).max(), (error, np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_states_equal_transformers(case: str, references: dict[str, Reference]) -> None:
    reference = references[case]
    expected = [rows[0].numpy() for rows in reference.compute().hidden_states]
    with load(reference) as model:
        n = model.config.n_layer
        states = model.states(IDS, layers="all")
        assert states.shape == (n + 1, N_TOKENS, model.config.n_embd)
        share = rounding(model.config)
        for layer in range(n):  # transformers' last ones are normed
            assert_near(states[layer], expected[layer], share)
        assert_near(model.states(IDS), expected[n], share)
        assert np.array_equal(model.states(IDS, layers=[-1, 1]), states[[n, 1]])


def test_states_of_a_scaled_residual_stream(references: dict[str, Reference]) -> None:
    """Granite's: plans keep them divided by a factor, ``states`` gives transformers'."""
    reference = references["granite"]
    expected = reference.compute().hidden_states
    with load(reference) as model:
        assert model.config.residual_scale != 1.0
        states = model.states(IDS, layers="all")
        for layer in range(model.config.n_layer):
            assert_near(states[layer], expected[layer][0].numpy(), rounding(model.config))


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_transformers(case: str, references: dict[str, Reference]) -> None:
    """A weight p is off by 2 p d at most, if scores are off by d: by the rounding of the largest
    score, which is at least as large as the log of the ratio of two weights.
    """
    reference = references[case]
    expected = [rows[0].numpy() for rows in reference.compute().attentions]
    with load(reference) as model:
        for layer in range(model.config.n_layer):
            found = model.attention(IDS, layer)
            seen = expected[layer] > 0
            score = max(1.0, float(-np.log(expected[layer][seen]).min()))
            assert np.array_equal(found.weights > 0, seen), layer
            error = np.abs(found.weights - expected[layer]).max()
            assert error <= 2 * rounding(model.config) * score, (layer, error, score)


@pytest.mark.parametrize("case", ["llama", "gemma3-softcap", "gptneox"])
def test_lens_applies_the_last_norm_and_matrix(case: str, references: dict[str, Reference]) -> None:
    """The states of transformers through its own last modules."""
    import torch

    reference = references[case]
    model = reference.model
    body = model.base_model
    norm = getattr(body, "norm", None) or body.final_layer_norm
    cap = getattr(model.config, "final_logit_softcapping", None)
    with load(reference) as ours:
        found = ours.lens(IDS, layers=[0, 2, -1])
        assert found.shape == (3, N_TOKENS, N_VOCAB)
        states = reference.compute().hidden_states
        for row, layer in enumerate([0, 2]):
            with float64_only(), torch.no_grad():
                expected = model.get_output_embeddings()(norm(states[layer]))[0].numpy()
            if cap:
                expected = cap * np.tanh(expected / cap)
            assert_near(found.logits[row], expected, rounding(ours.config))
        assert_near(found.logits[2], reference.compute().logits[0].numpy(), rounding(ours.config))
        some = ours.lens(IDS, layers=[2], positions=[-1, 5])
        assert_near(some.logits[0], found.logits[1, [-1, 5]], rounding(ours.config))
        assert found.ranks(int(found.best[2, 7]))[2, 7] == 0
        total = sum(found.probabilities(token)[1, 3] for token in range(N_VOCAB))
        assert abs(total - 1) < 1e-5


# -- patches ---------------------------------------------------------------------------------------


def hooked(reference: Reference, module: Any, change: Callable[[Any], Any], before: bool) -> Array:
    """The logits of transformers with a module's input or output changed."""
    if before:
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    else:

        def after(_: Any, args: Any, made: Any) -> Any:
            return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)

        handle = module.register_forward_hook(after)
    try:
        logits: Array = reference.compute().logits[0].numpy()
    finally:
        handle.remove()
    return logits


@pytest.mark.parametrize("case", ["llama", "gemma3-softcap", "mixtral"])
def test_a_head_without_output(case: str, references: dict[str, Reference]) -> None:
    """Zeros in place of what one head gives, as in transformers, by every way to read a text."""
    reference = references[case]
    layer = reference.model.base_model.layers[1].self_attn

    def without(x: Any) -> Any:
        heads = x.clone().unflatten(-1, (4, -1))
        heads[..., 2, :] = 0
        return heads.flatten(-2)

    def ours(heads: np.ndarray) -> None:
        heads[:, 2] = 0

    expected = hooked(reference, layer.o_proj, without, before=True)
    with load(reference) as model:
        plain = model.logits(IDS)
        with model.patch({"L1.attn": ours}):
            for logits in ways(model).values():
                assert_near(logits, expected, rounding(model.config))
        assert np.abs(plain - expected).max() > 1e-2 * np.abs(expected).max()
        assert np.array_equal(model.logits(IDS), plain)


@pytest.mark.parametrize(
    ("label", "find", "before"),
    [
        ("L1", lambda layers: layers[1], False),  # the states after a layer
        ("L1.ffn.silu", lambda layers: layers[1].mlp.down_proj, True),
        ("L1.ffn.norm", lambda layers: layers[1].post_attention_layernorm, False),
        ("L1.ffn.gate_up", lambda layers: layers[1].mlp.gate_proj, False),  # and up_proj below
    ],
)
def test_patches_of_steps(
    label: str, find: Callable[[Any], Any], before: bool, references: dict[str, Reference]
) -> None:
    """Halves of values in buffers of each kind: states, packed rows, products side by side."""
    reference = references["llama"]
    layers = reference.model.base_model.layers
    expected = hooked(reference, find(layers), lambda x: x / 2, before)

    def half(values: np.ndarray, step: treadle.StepValues) -> np.ndarray:
        assert step.label == label
        assert step.tokens.tolist() == [IDS[at] for at in step.positions]
        changed = values.copy()
        changed[..., step.parts.get("gate", slice(None))] /= 2
        return changed

    with load(reference) as model, model.patch({label: half}):
        for logits in ways(model).values():
            assert_near(logits, expected, rounding(model.config))
        states = model.states(IDS, layers=[2])
    with load(reference) as model:
        assert not np.array_equal(model.states(IDS, layers=[2]), states)


def test_patched_routing(references: dict[str, Reference]) -> None:
    """Only the last expert is used, with weight 1."""
    reference = references["mixtral"]

    def last(weights: np.ndarray) -> np.ndarray:
        changed = np.zeros_like(weights)
        changed[:, -1] = 1
        return changed

    with load(reference) as model:
        with model.trace("L1.ffn.route", "L1.ffn.norm", "L1.attn.output", "L1") as plain:
            model.logits(IDS)
        routed = plain["L1.ffn.route"]
        assert routed.axes == ("token", "expert")
        assert (np.count_nonzero(routed.values, axis=1) == 2).all()
        assert np.allclose(routed.values.sum(1), 1)
        with model.patch({"L1.ffn.route": last}), model.trace("L1", "L1.ffn.norm") as t:
            model.logits(IDS)
        mlp = model.gguf.tensors
        up, gate, down = (
            mlp[f"blk.1.ffn_{name}_exps.weight"].dequantize()[-1].astype(np.float64)
            for name in ("up", "gate", "down")
        )
        h = t["L1.ffn.norm"].values.astype(np.float64)
        g = h @ gate.T
        expert = (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T
        expected = plain["L1.attn.output"].values + expert
        assert_near(t["L1"].values, expected, rounding(model.config))


ARCHS: dict[str, dict[str, int]] = {
    **{key: {} for key in ("llama", "deepseek2", "falcon-h1", "rwkv7", "t5encoder", "kimi-linear")},
    **{key: {"window": 16} for key in ("gemma3n", "gemma4")},
    **{key: {"n_expert": 4, "n_ff_exp": 64} for key in ("qwen3moe", "smallthinker")},
}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_step_is_written_back_as_it_was_read(arch: str, tiny: WriteTiny) -> None:
    """A patch of all labels that returns copies changes no bit."""
    with treadle.load(tiny(arch, "F32", **ARCHS[arch]), threads=2, kv="f32") as model:

        def read(ids: list[int]) -> np.ndarray:
            return model.logits(ids) if model.config.causal else model.embed([ids])

        for ids in (IDS, IDS[:1]):
            plain = read(ids)
            with model.patch({"*": np.copy}), model.trace("*") as t:
                assert np.array_equal(read(ids), plain)
            for label in t.labels:
                assert np.isfinite(t[label].values).all(), label
                assert len(t[label]) in (len(ids), 1)


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "BF16", "Q4_K"])
def test_hooks_of_a_quantised_model(fmt: str, tiny: WriteTiny) -> None:
    """What a step wrote is what the next one has read: the product of the packed values and the
    file's weights, plus the states before, is the sum that was traced; at full speed, in plans for
    one token, for a few and for many; of values that were changed, too.
    """
    labels = "L1.ffn.silu", "L1.attn.output", "L1.ffn.down"
    sizes = {"n_embd": 256, "n_ff": 256, "head_dim": 64} if fmt == "Q4_K" else {"n_ff": 96}
    with treadle.load(tiny("llama", fmt, **sizes), threads=2, kv="f32") as model:
        down = model.gguf.tensors["blk.1.ffn_down.weight"].dequantize().astype(np.float64)
        for n in (1, 3, N_TOKENS):
            largest = []
            for factor in (1.0, 0.25):
                patch = {labels[0]: lambda values, factor=factor: values * factor}
                with model.patch(patch), model.trace(*labels) as t:
                    model.logits(IDS[:n])
                silu, before, after = (t[label].values.astype(np.float64) for label in labels)
                assert silu.shape == (n, sizes["n_ff"])
                error = np.abs(after - before - silu @ down.T)
                bound = rounding(model.config) * np.abs(after).max()
                kernel = model.plan(n, n).match(labels[-1])[0].kernel
                if "_q16_" in kernel and n > 4:
                    # Products of many tokens round these weights to 16-bit words as well.
                    bound += np.abs(silu).sum(1).max() * np.abs(down).max() / WORD_TOP / 2
                if "_matrix" in kernel:
                    share = weight_rounding(fmt, model.isa)
                    bound += share * (np.abs(silu) @ np.abs(down).T).max()
                assert error.max() <= bound, (n, factor, error.max(), bound)
                largest.append(np.abs(silu).max())
            assert abs(largest[1] / largest[0] - 0.25) < 0.01


def test_trace_changes_no_bit(tiny: WriteTiny) -> None:
    """Without hooks an engine is what it was; beside a trace it computes the same bits."""
    with treadle.load(tiny("llama", "Q4_0"), threads=2) as model:
        plain = ways(model)
        with model.trace("L*.attn", "L1") as t:
            traced = ways(model)
            assert len(t.runs) == 1 + len(IDS) + -(-len(IDS) // 13)
        assert type(model.engine) is Engine
        again = ways(model)
        assert all(np.array_equal(plain[way], traced[way]) for way in plain)
        assert all(np.array_equal(plain[way], again[way]) for way in plain)


def test_rows_of_a_generation(tiny: WriteTiny) -> None:
    """A row for each token that was run, with its position, whatever the chunks of the prompt; a
    prompt that is cached is run again.
    """
    with treadle.load(tiny("llama", "F32"), threads=2, kv="f32", context=1024) as model:
        prompt = np.random.default_rng(3).integers(3, N_VOCAB, 600).tolist()  # two runs
        model.generate(prompt, max_tokens=2).finish()
        with model.trace("L1", "L2.attn", "output") as t:
            made = model.generate(prompt, max_tokens=5, temperature=0)
            made.finish()
        assert made.timings.n_cached == 0
        whole = [*prompt, *made.ids[:-1]]
        rows = t["L1"]
        assert rows.axes == ("token", "embd")
        assert rows.tokens.tolist() == whole
        assert rows.positions.tolist() == list(range(len(whole)))
        assert set(rows.sequences.tolist()) == {0}
        assert_near(rows.values, model.states(whole, layers=[2])[0], rounding(model.config))
        assert t["L2.attn"].shape == (len(whole), 4, 32)
        assert t["output"].positions.tolist() == list(range(len(prompt) - 1, len(whole)))
        assert t["output"].values.argmax(1).tolist() == made.ids
        after = model.generate(prompt, max_tokens=1)
        after.finish()
        assert after.timings.n_cached > 0  # of the text before the trace


def test_rows_of_several_sequences(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=2, kv="f32", n_sequences=3) as model:
        prompts = [IDS[:40], IDS[5:30], IDS[:7]]
        with model.trace("L2") as t:
            made = list(model.generate_many(prompts, max_tokens=6, temperature=0))
        texts = [[*prompt, *one.ids[:-1]] for prompt, one in zip(prompts, made, strict=True)]
        found = [t["L2"].sequence(i) for i in range(3)]
        assert sorted(len(rows) for rows in found) == sorted(map(len, texts))
        for rows in found:
            ids = rows.tokens.tolist()
            assert ids in texts
            assert rows.positions.tolist() == list(range(len(ids)))
            expected = model.states(ids, layers=[3])[0]
            assert_near(rows.values, expected, rounding(model.config))


def test_rows_of_rejected_drafts_are_left_out(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=2, kv="f32", speculate=True) as model:
        prompt = IDS[:8] * 4
        with model.trace("L1") as t:
            made = model.generate(prompt, max_tokens=40, temperature=0)
            made.finish()
        whole = [*prompt, *made.ids[:-1]]
        rows = t["L1"]
        assert rows.tokens.tolist() == whole
        assert rows.positions.tolist() == list(range(len(whole)))
        assert sum(len(run.tokens) for run in t.runs) >= len(whole)
        assert_near(rows.values, model.states(whole, layers=[2])[0], rounding(model.config))


def test_patched_keys_are_never_reused(tiny: WriteTiny, tmp_path: Path) -> None:
    """Neither from memory nor from page files, neither by the patched text nor from it."""
    path = tiny("llama", "F32")

    def wild(values: np.ndarray) -> None:
        values[:] = values[:, ::-1].copy()

    def text(model: treadle.Model, **more: Any) -> list[int]:
        made = model.generate(prompt, max_tokens=8, temperature=0, **more)
        made.finish()
        return made.ids

    prompt = [*IDS, *IDS]
    folder = tmp_path / "pages"
    with treadle.load(path, threads=2, kv="f32", cache_dir=folder) as model:
        plain = text(model)
        with model.patch({"L0": wild}):
            changed = text(model)
            session = model.session()
            text(model, session=session)
        assert changed != plain
        assert text(model) == plain
        session.close()
        assert text(model) == plain
        with model.patch({"L0": wild}):
            assert text(model) == changed
            assert text(model, cache_prompt=False) == changed
    with treadle.load(path, threads=2, kv="f32", cache_dir=folder) as model:
        with model.patch({"L0": wild}):
            assert text(model) == changed
        made = model.generate(prompt, max_tokens=8, temperature=0)
        made.finish()
        assert made.ids == plain
        assert made.timings.cache.files > 0


def test_plans_with_hooks_are_not_stored(
    tiny: WriteTiny, one_kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither are those of a second process changed, which has the plans of the first."""
    monkeypatch.setenv("TREADLE_PLANS", "1")
    path = tiny("llama", "F32", n_ff=160)
    with treadle.load(path, threads=2) as model:
        plain = model.logits(IDS)
    stored = set((one_kernel_cache / "plans").iterdir())
    with treadle.load(path, threads=2) as model:
        assert np.array_equal(model.logits(IDS), plain)
        with model.trace("L1") as t:
            assert np.array_equal(model.logits(IDS), plain)
        assert t["L1"].shape == (len(IDS), 64)
    assert set((one_kernel_cache / "plans").iterdir()) == stored


def test_a_signal_in_a_traced_run(tiny: WriteTiny) -> None:
    """The run is undone: its rows are not there twice."""
    with treadle.load(tiny("llama", "F32"), threads=1, kv="f32") as model:
        calls = 0

        def interrupt(values: np.ndarray) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyboardInterrupt

        with model.trace("L1") as t, model.patch({"L0": interrupt}):
            with pytest.raises(KeyboardInterrupt):
                model.logits(IDS)
            assert not t.runs
            model.logits(IDS)
        assert len(t["L1"]) == len(IDS)


# -- errors ----------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        with pytest.raises(treadle.TreadleError, match=r"'L1.fnn.down'.*near: L1.ffn.down"):
            model.trace("L1.fnn.down")
        with pytest.raises(treadle.TreadleError, match="no label"):
            model.trace()
        with (
            pytest.raises(treadle.TreadleError, match="expected a function"),
            model.patch({"L1": 3}),  # type: ignore[dict-item]
        ):
            pass
        with pytest.raises(treadle.TreadleError, match=r"layers: 4: expected 0 .* to 3"):
            model.states(IDS, layers=[4])
        with pytest.raises(treadle.TreadleError, match="layer=3"):
            model.attention(IDS, 3)
        with (
            model.patch({"L1": lambda values: values[1:]}),
            pytest.raises(treadle.TreadleError, match=r"patch of L1 .*\[47, 64\]"),
        ):
            model.logits(IDS)
        with model.trace("L1") as t:
            pass
        with pytest.raises(treadle.TreadleError, match="no run had this step"):
            t["L1"]
        with pytest.raises(treadle.TreadleError, match="'L2' was not traced"):
            t["L2"]
        assert type(model.engine.cache).__mro__[1] is KVCache
    with (
        treadle.load(tiny("mamba2", "F32", n_layer=2), threads=1) as model,
        pytest.raises(
            treadle.UnsupportedError, match="layer 0 has no attention: its mixer is mamba2"
        ),
    ):
        model.attention(IDS, 0)
    with (
        treadle.load(tiny("gemma3n", "F32", window=16), threads=1) as model,
        pytest.raises(treadle.UnsupportedError, match="several streams"),
    ):
        model.states(IDS, layers="all")


def test_pictures_in_notebooks_escape_the_pieces(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        ids = model.tokenize("<b>&", bos=False)
        attention = model.attention(ids, 0)
        assert repr(attention) == f"AttentionWeights(layer 0, 4 heads, {len(ids)} tokens)"
        for html in (attention._repr_html_(), model.lens(ids)._repr_html_()):
            assert "&lt;" in html
            assert "<b>" not in html.replace("<br>", "")
