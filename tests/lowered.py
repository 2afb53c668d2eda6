"""Plans whose invariants a test checks without compiling: kernels that no run of the test needs
take longer than all of its runs.
"""

from __future__ import annotations

from treadle.engine.engine import Engine
from treadle.engine.prepared_plan import PlanKey
from treadle.plan.plan import Plan


def lowered(engine: Engine, n_tokens: int = 1, n_outputs: int = 1, output: str = "") -> Plan:
    """The plan that ``engine.plan`` has for such batches, with nothing compiled."""
    adapted, steered = engine._adapter_kinds(engine.cache.lora)
    made = output or engine.config.main_output
    return engine.lower(engine._key(PlanKey(n_tokens, n_outputs, made, adapted, False, steered)))
