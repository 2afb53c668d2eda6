"""The CPU device: a team of threads, the compiled step loop, and what it keeps on disk and in
memory.

::

    device.py            Cpu: the device; plans come from ``plan/lowering/ops.py``
    thread_team.py       Team: Python's threads that run the compiled loop; HostMemory; AbortFlag,
                         which stops a run when a signal arrives
    memory_layouts.py    memory that Python and compiled code share: a team's job, its steps
    step_loop.py         the compiled loop: threads claim items of a step, then go to the next
    stored_plan.py       plans on disk, so that a later process lowers nothing; StepTable: a plan's
                         steps as arrays of offsets, before addresses are known
    item_range.py        a part of a step, as a step of its own
    mapping_faults.py    SIGBUS handler: a truncated model file gives zeros and an error
    fault_handler.py     the handler as a kernel
    chosen_isa.py        the instruction set that a start has chosen, on disk
    residence.py         bytes of a file in memory, in huge pages, and of the process
    weight_quantizer.py  quantisation of weights for files, with compiled search kernels
    tuned_rows.py        kernel parameters that ``treadle tune`` measured on this machine
"""
