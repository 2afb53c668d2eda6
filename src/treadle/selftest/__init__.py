"""``treadle check``: compares this machine's results with those of the kernels' numpy twins.

::

    model_check.py      check_model: all checks of a model, and their CheckReport
    kernel_check.py     each kernel of a plan against its twin, step by step
    twin_results.py     the comparison of one step's results, by kind of kernel
    rounding_bounds.py  tolerances, derived from how each kernel adds
    batches.py          random batches for a plan
    tower_runs.py       random rows for the plans of picture and sound encoders
    texts.py            a greedy text against the twins, and a known text
    thread_check.py     equal bits on any number of threads
    speeds.py           speeds compared with the machine's peaks
    machine_facts.py    facts of the machine for the report
"""
