"""The imports of the warm process from which engines are forked."""

from __future__ import annotations

import gc
from importlib import import_module

# Modules that the load of any model imports.
PRELOADED = (
    "treadle.cli.commands.serve",
    "treadle.server.serve",
    "treadle.server.router.engine",
    "treadle.server.router.engine_turns",
    "treadle.api.media",
    "treadle.api.model",
    "treadle.catalog.records",
    "treadle.chat.template.renderer",
    "treadle.convert.open",
    "treadle.devices.cpu.device",
    "treadle.devices.cpu.tuned_rows",
    "treadle.files.gguf_writer",
    "treadle.kernels.attention.int16_tile",
    "treadle.kernels.attention.paged",
    "treadle.kernels.attention.wide",
    "treadle.kernels.elementwise.add",
    "treadle.models.load",
    "treadle.models.lora",
    "treadle.plan.lowering.attention",
    "treadle.plan.lowering.deferred",
    "treadle.plan.lowering.inputs",
    "treadle.plan.lowering.logits",
    "treadle.plan.lowering.steps",
    "treadle.scheduler.scheduler",
    "treadle.spec_decode.proposer",
    "treadle.tokenizer.bpe",
    "treadle.tokenizer.spm",
    "llvmlite.binding",
    "numpy.random",
)


def preload() -> None:
    """Import the modules that engines need, and exclude all present objects from garbage
    collection: a collection in a forked engine would write to each, and so copy its page.
    """
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.disable()
    gc.freeze()
