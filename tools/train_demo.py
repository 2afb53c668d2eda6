"""Train the small model that ships inside treadle, and write it as GGUF.

    python tools/train_demo.py --out FILE --work DIR [--start FILE] [--steps N] [--resume]

Everything follows from the library's text, the seed and the step number, so a run that was stopped
and resumed is the run that was never stopped. A resume may change --steps while the learning rate
is still constant (before half of both numbers): the run is then one of the new number.
docs/demo-model.md says what the shipped file was made from and how good it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import demo_data
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from demo_export import complete, export, read_back
from demo_model import (
    Optimizer,
    Size,
    Weights,
    dropout_masks,
    forward,
    grow,
    initial_weights,
    rope_table,
)
from tokenizers import Tokenizer
from torch import Tensor

from treadle.files.gguf import open_gguf

CHECKPOINT_SECONDS = 180.0
LOG_EVERY = 20
EVALUATE_EVERY = 500
PROMPTS = ("def fibonacci(n):", "class Stack:", "import os\n\ndef ")
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class Phase:
    """From this share of the steps on: windows of ``context`` tokens out of the named streams."""

    start: float
    context: int
    streams: str


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, besides the text, the file to start from, and the steps."""

    size: Size
    batch_tokens: int
    phases: tuple[Phase, ...]
    n_streams: int
    warmup: int
    dropout: float
    seed: int = 2
    grown_from: Size | None = None  # the shape of the file to start from


# The first stage sees the library alone, many times; the second grows out of it and sees all texts.
SMALL = Recipe(
    Size(2560, 8, 256, 512, 4, 2, 1024),
    12288,
    (Phase(0.0, 256, "library"), Phase(0.864, 1024, "library")),
    8,
    100,
    0.1,
)
DEMO = Recipe(
    Size(2560, 8, 256, 1024, 4, 2, 1024),
    12288,
    (Phase(0.0, 256, "all"), Phase(0.5, 256, "finish"), Phase(0.75, 1024, "finish")),
    1,
    50,
    0.0,
    grown_from=SMALL.size,
)
# A third stage goes on from the second's file, and ends in longer windows.
FURTHER = replace(
    DEMO,
    phases=(Phase(0.0, 256, "all"), Phase(0.35, 256, "finish"), Phase(0.6, 1024, "finish")),
    seed=3,
    grown_from=DEMO.size,
)
# A fourth stage has two more layers, and reads packages that the others did not have.
DEEPER = replace(
    FURTHER,
    size=replace(DEMO.size, n_layer=10),
    phases=(Phase(0.0, 256, "wide"), Phase(0.21, 1024, "wide"), Phase(0.6, 1024, "like")),
    seed=5,
)
TINY = Recipe(
    Size(288, 2, 64, 96, 2, 1, 64),
    256,
    (Phase(0.0, 32, "library"), Phase(0.864, 64, "library")),
    2,
    1,
    0.1,
)
TINY_GROWN = replace(TINY, size=replace(TINY.size, n_ff=128), grown_from=TINY.size)
TINY_FURTHER = replace(TINY_GROWN, seed=3, grown_from=TINY_GROWN.size)
TINY_DEEPER = replace(TINY_FURTHER, size=replace(TINY_GROWN.size, n_layer=3), seed=5)


@dataclass(frozen=True)
class Text:
    """All texts as the trainer sees them; streams by the name that a phase calls them."""

    tokenizer: Tokenizer
    streams: dict[str, list[npt.NDArray[np.uint16]]]
    held_out: list[demo_data.Document]
    fingerprint: str
    versions: dict[str, str] = field(default_factory=dict)  # of the packages that were read


def recipe_of(start: Path | None, tiny: bool, deeper: bool = False) -> Recipe:
    """The stage that comes after the one that wrote the file to start from."""
    first, *later = (TINY, TINY_GROWN, TINY_FURTHER) if tiny else (SMALL, DEMO, FURTHER)
    if deeper:
        later = [TINY_DEEPER if tiny else DEEPER]
    if start is None:
        return first
    with open_gguf(start) as gguf:
        keys = ("llama.block_count", "llama.feed_forward_length")
        shape = tuple(gguf.metadata[key] for key in keys)
    for stage in later:
        small = stage.grown_from
        if small is not None and (small.n_layer, small.n_ff) == shape:
            return stage
    raise SystemExit(f"{start} is not the file of an earlier stage")


def prepare(recipe: Recipe, work: Path, tiny: bool, wheels: Path | None = None) -> Text:
    """Read, split and tokenise the texts; the tokenizer and the streams are kept in work."""
    train, held_out = demo_data.split(demo_data.read_library())
    if tiny:
        train = train[:12]
        held_out = [min(held_out, key=lambda document: len(document.text))]
    library = demo_data.fingerprint([*train, *held_out])
    file = work / f"tokenizer-{library}-{recipe.size.n_vocab}.json"
    if not file.exists():
        demo_data.train_tokenizer(train, recipe.size.n_vocab).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    sources = demo_data.Sources(train)
    if {phase.streams for phase in recipe.phases} != {"library"}:
        sources = demo_data.Sources.of_this_environment(train, held_out, wheels)
    fingerprint = demo_data.fingerprint([*sources.everything, *held_out])
    streams: dict[str, list[npt.NDArray[np.uint16]]] = {}
    for name in dict.fromkeys(phase.streams for phase in recipe.phases):
        streams[name] = []
        for n in range(recipe.n_streams):
            file = work / f"{name}-{fingerprint}-{n}-{recipe.seed}.npy"
            if not file.exists():
                np.save(file, sources.stream(name, tokenizer, recipe.seed * 1000 + n))
            streams[name].append(np.load(file))
    return Text(tokenizer, streams, held_out, fingerprint, sources.versions)


def phase_at(recipe: Recipe, step: int, steps: int) -> Phase:
    """The last phase that has begun."""
    return [phase for phase in recipe.phases if step >= phase.start * steps][-1]


def batch_of(recipe: Recipe, text: Text, step: int, phase: Phase) -> tuple[Tensor, Tensor]:
    """Inputs and targets [windows, context] of a step.

    Each pass over the text takes the next stream. Windows begin at multiples of the golden ratio,
    modulo one: they cover the stream evenly, whatever their length, and need no saved state.
    """
    streams = text.streams[phase.streams]
    context = phase.context
    stream = streams[step * recipe.batch_tokens // len(streams[0]) % len(streams)]
    windows = recipe.batch_tokens // context
    index = np.arange(step * windows, (step + 1) * windows, dtype=np.float64)
    starts = (index * ((math.sqrt(5) - 1) / 2) % 1.0 * (len(stream) - context - 1)).astype(np.int64)
    taken = stream[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    both = torch.from_numpy(taken)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """Warm-up, constant to the half, then straight down to zero."""
    return min(1.0, (step + 1) / recipe.warmup, 2.0 * (steps - step) / steps)


def train(
    recipe: Recipe,
    text: Text,
    work: Path,
    steps: int,
    *,
    start: Path | None,
    resume: bool,
    compiled: bool,
    stop: int,
) -> Weights:
    """Train to the last step (or to stop, leaving a checkpoint) and return the float32 weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = initial_weights(recipe.size, recipe.seed)
    if recipe.grown_from is not None and start is not None:
        weights = grow(read_back(start, recipe.grown_from), weights)
    weights = {k: v.to(device) for k, v in weights.items()}
    optimizer = Optimizer(weights)
    first = _load(work, recipe, text, weights, optimizer) if resume else 0
    for value in weights.values():
        value.requires_grad_()
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    saved = time.monotonic()
    for step in range(first, min(steps, stop)):
        loss = _train_step(recipe, text, weights, optimizer, loss_of, step, steps)
        if step % LOG_EVERY == 0:
            _log(work, step=step, steps=steps, loss=round(loss.item(), 4))
        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            _log(work, step=step, held_out=held_out_loss(weights, recipe.size, text))
        if time.monotonic() - saved > CHECKPOINT_SECONDS or step + 1 == min(steps, stop):
            _save(work, recipe, text, weights, optimizer, step + 1)
            saved = time.monotonic()
    return {stem: value.detach().cpu() for stem, value in weights.items()}


def _train_step(
    recipe: Recipe,
    text: Text,
    weights: Weights,
    optimizer: Optimizer,
    loss_of: Callable[..., Tensor],
    step: int,
    steps: int,
) -> Tensor:
    device = weights["token_embd"].device
    phase = phase_at(recipe, step, steps)
    context = phase.context
    ids, targets = (t.to(device) for t in batch_of(recipe, text, step, phase))
    cos, sin = (t.to(device) for t in rope_table(recipe.size, context))
    masks = None
    if recipe.dropout:
        seed = recipe.seed * 10**6 + step
        masks = dropout_masks(recipe.size, context, recipe.dropout, seed).to(device)
    loss = loss_of(weights, recipe.size, ids, targets, (cos, sin), masks)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    pairs = dict(zip(weights, gradients, strict=True))
    optimizer.step(pairs, step, rate_at(recipe, step, steps))
    return loss.detach()


def _loss(
    weights: Weights,
    size: Size,
    ids: Tensor,
    targets: Tensor,
    rope: tuple[Tensor, Tensor],
    masks: Tensor | None,
) -> Tensor:
    logits = forward(weights, size, ids, rope, masks)
    return F.cross_entropy(logits.view(-1, size.n_vocab).float(), targets.view(-1))


def held_out_loss(
    weights: Weights, size: Size, text: Text, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Mean loss in nats over every token of the held-out files, its perplexity, bits per byte.

    Windows of the whole context move by half a window; only their later half counts, except at
    the beginning of a file.
    """
    device = weights["token_embd"].device
    total = 0.0
    n_tokens = 0
    n_bytes = 0
    half = size.n_ctx // 2
    rope = tuple(t.to(device) for t in rope_table(size, size.n_ctx))
    for document in text.held_out:
        ids = torch.tensor(demo_data.encode_document(text.tokenizer, document.text))
        for start in range(0, max(1, len(ids) - 1 - half), half):
            window = ids[start : start + size.n_ctx + 1].to(device)
            n = len(window) - 1
            table = (rope[0][:n], rope[1][:n])
            with torch.no_grad():
                logits = forward(weights, size, window[None, :-1], table, None, dtype)
            losses = F.cross_entropy(logits[0].float(), window[1:], reduction="none")
            counted = losses[half if start else 0 :]
            total += counted.sum().item()
            n_tokens += len(counted)
        n_bytes += len(document.text.encode())
    mean = total / n_tokens
    return {
        "loss": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": total / math.log(2) / n_bytes,
        "n_tokens": n_tokens,
        "n_bytes": n_bytes,
    }


def _identity(recipe: Recipe, text: Text) -> str:
    return json.dumps([asdict(recipe), text.fingerprint], sort_keys=True)


def _save(
    work: Path, recipe: Recipe, text: Text, weights: Weights, optimizer: Optimizer, step: int
) -> None:
    state = {
        "identity": _identity(recipe, text),
        "step": step,
        "weights": {stem: value.detach() for stem, value in weights.items()},
        "optimizer": optimizer.state,
    }
    new = work / "checkpoint.new"
    torch.save(state, new)
    os.replace(new, work / "checkpoint.pt")


def _load(work: Path, recipe: Recipe, text: Text, weights: Weights, optimizer: Optimizer) -> int:
    state = torch.load(work / "checkpoint.pt", map_location="cpu", weights_only=True)
    if state["identity"] != _identity(recipe, text):
        raise SystemExit(f"{work}/checkpoint.pt belongs to another recipe or another library")
    for stem, value in weights.items():
        value.copy_(state["weights"][stem])
    for name, value in optimizer.state.items():
        value.copy_(state["optimizer"][name])
    return int(state["step"])


def _log(work: Path, **fields: Any) -> None:
    line = json.dumps({"time": round(time.time()), **fields})
    with (work / "log.jsonl").open("a") as log:
        log.write(line + "\n")
    print(line, file=sys.stderr, flush=True)


def facts_of(recipe: Recipe, text: Text, steps: int) -> dict[str, str | float]:
    """Return the file's facts about itself, under general.*."""
    facts: dict[str, str | float] = {
        "name": "treadle-demo",
        "size_label": f"{n_parameters(recipe.size) / 1e6:.1f}M",
        "license": "PSF-2.0",
        "license.link": "https://docs.python.org/3/license.html",
        "description": (
            "A small model that completes Python code, shipped inside treadle. Trained by "
            f"tools/train_demo.py: {steps} steps of {recipe.batch_tokens} tokens."
        ),
        "dataset.0.name": "The Python standard library: sources and docstrings",
        "dataset.0.version": f"CPython {platform.python_version()}, text {text.fingerprint}",
        "dataset.0.organization": "Python Software Foundation",
        "sampling.penalty_repeat": 1.1,  # without it one text in five goes round in a loop
    }
    if text.versions:
        facts["license"] = "other"
        facts["license.name"] = "PSF-2.0 (Python), and BSD, MIT, Apache-2.0, MPL-2.0 (packages)"
        facts["dataset.1.name"] = "Python packages: sources and docstrings"
        facts["dataset.1.version"] = ", ".join(f"{k} {v}" for k, v in text.versions.items())
    return facts


def n_parameters(size: Size) -> int:
    """Weights of the model, the tied embeddings counted once."""
    return sum(value.numel() for value in initial_weights(size, 0).values())


def report(out: Path, work: Path, weights: Weights, recipe: Recipe, text: Text, steps: int) -> None:
    """Log the held-out loss of the weights before and after the file's rounding, and samples."""
    size = recipe.size
    rounded = read_back(out, size)
    samples = {
        f"{prompt} @ {temperature}": complete(
            rounded, size, text.tokenizer, prompt, SAMPLE_TOKENS, temperature
        )
        for prompt in PROMPTS
        for temperature in (0.0, 0.7)
    }
    _log(
        work,
        parameters=n_parameters(size),
        tokens_seen=steps * recipe.batch_tokens,
        stream_tokens={name: [len(s) for s in all] for name, all in text.streams.items()},
        file_bytes=out.stat().st_size,
        float32=held_out_loss(weights, size, text, torch.float32),
        rounded=held_out_loss(rounded, size, text, torch.float32),
        samples=samples,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--stop", type=int, default=sys.maxsize, help="stop early, without a file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--start", type=Path, help="an earlier stage's file: train the next stage")
    parser.add_argument("--seed", type=int, help="another order of the text, for a stage once more")
    parser.add_argument("--deeper", action="store_true", help="the stage with two more layers")
    parser.add_argument("--wheels", type=Path, help="a folder of packages to read as well")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same kind, in seconds")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    args = parser.parse_args(argv)
    # A toy's steps are too small to share: on a busy machine two threads mostly wait.
    torch.set_num_threads(1 if args.tiny else 2)
    compiled = not (args.no_compile or args.tiny)
    if compiled:
        torch.use_deterministic_algorithms(True)
    else:  # the same, but for torch.compile, the import of which takes longer than a toy's training
        torch.set_deterministic_debug_mode("error")
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(args.start, args.tiny, args.deeper)
    if args.seed is not None:
        recipe = replace(recipe, seed=args.seed)
    text = prepare(recipe, args.work, args.tiny, args.wheels)
    weights = train(
        recipe,
        text,
        args.work,
        args.steps,
        start=args.start,
        resume=args.resume,
        compiled=compiled,
        stop=args.stop,
    )
    if args.stop >= args.steps:
        export(args.out, weights, recipe.size, text.tokenizer, facts_of(recipe, text, args.steps))
        report(args.out, args.work, weights, recipe, text, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
