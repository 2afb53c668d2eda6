"""Plans (the steps of a forward pass), and the lowering of a graph's ops into steps.

::

    plan.py       Plan, Step, Buffer, Const: labelled steps, and the memory that they share
    hook_rows.py  HookPoint: where hooks read and change the values that steps write
    lowering/     the ops of ``models/ops.py`` as steps for CPU and CUDA devices
"""
