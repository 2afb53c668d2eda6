"""treadle's models in DSPy, in the same process.

::

    import dspy
    from dspy_treadle import treadle_lm

    dspy.configure(lm=treadle_lm("model.gguf"), adapter=dspy.JSONAdapter())
"""

from dspy_treadle.engine import AsyncTreadleEngine, TreadleEngine, treadle_lm

__all__ = ["AsyncTreadleEngine", "TreadleEngine", "treadle_lm"]
