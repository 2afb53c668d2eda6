"""Scheduling: which tokens of which requests the engine runs next.

::

    scheduler.py      Scheduler: a step builds a batch, runs it, and samples the next tokens.
                      CooperativeStepper: runs the steps in the threads that wait for output
    request.py        Request: ids, sampler and state of one generation
    queue.py          RequestQueue: waiting and running requests, admission, preemption
    batch_builder.py  BatchBuilder: the items of the next batch
    step_budget.py    prompt tokens per step, from measured step times; fair shares of them
    media_queue.py    MediaQueue: encodes pictures and sounds of prompts, between steps
    encoder_queue.py  EncoderQueue: encodes prompts of encoder-decoder models, between steps
    output.py         RequestOutput: ids in, pieces of text out, stop strings
"""
