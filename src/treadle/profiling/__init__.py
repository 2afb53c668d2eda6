"""Measurements of this machine: peak rates, kernel trials, and the report of ``treadle doctor``.

::

    peaks.py           peak rates of arithmetic and of reading memory
    trial.py           KernelTrial: checks and times variants of one matrix product
    tune.py            ``treadle tune``: the fastest shape of each kernel on this machine
    report.py          ``treadle doctor``: describe, and the sections on caches, model and peaks
    facts.py           the sections on CPU, threads and memory, with warnings and their cures
    kernel_inspect.py  LLVM IR and assembly of a cached kernel
"""
