"""The engine: runs a batch on a device by its prepared plan and returns logits.

::

    engine.py         Engine: plans, pages and runs of one model; token ids in, logits out.
                      EngineObserver: a drafter's code before and after each run
    batch.py          BatchItem, RunInputs: a batch, written as the input block of a run
    prepared_plan.py  PreparedPlan: a plan placed in memory and compiled, and its PlanKey
    logits.py         LogitsBatch: the logits of a run, as samplers read them
    hooks.py          HookedEngine: code that reads or changes values between steps
    step_slices.py    StepSlices: runs a plan in slices of time
    text_encoder.py   TextEncoder: the encoder of an encoder-decoder model
    cross_keys.py     CrossKeys: keys and values of an encoder's rows, for a decoder
"""
