"""Scheduling: which tokens of which requests the engine runs next.

::

    scheduler.py      Scheduler: a step builds a batch, runs it, and samples the next tokens
    stepping.py       CooperativeStepper: which thread runs the steps
    request.py        Request: ids, sampler and state of one generation
    queue.py          RequestQueue: waiting and running requests, admission, preemption
    batch_builder.py  BatchBuilder: the items of the next batch
    step_budget.py    prompt tokens per step, from measured step times; fair shares of them
    media_queue.py    encoding of pictures and sound between steps
    encoder_queue.py  encoding of prompts between steps, in encoder-decoder models
    output.py         RequestOutput: ids in, pieces of text out, stop strings
"""
