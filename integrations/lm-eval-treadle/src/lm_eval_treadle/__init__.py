"""The model ``treadle`` of lm-evaluation-harness.

Importing this package registers it: ``lm_eval.simple_evaluate(model="treadle", model_args=...)``.
lm-eval 0.4 finds no models of other packages by itself, so its command has a twin here that does
the same import first: ``lm-eval-treadle``, or ``python -m lm_eval_treadle``.
"""

from lm_eval.api.registry import model_registry

from lm_eval_treadle.model import TreadleLM

__all__ = ["TreadleLM"]

if "treadle" not in model_registry:
    model_registry.register("treadle", target=TreadleLM)
