"""Plans (the steps of a forward pass), and the lowering of a graph's ops into steps.

::

    plan.py       Plan, Step, Buffer, Const: labelled steps, and the memory that they share
    weights.py    Weights: a model's tensors as constants of plans
    hook_rows.py  HookPoint: where hooks read and change the values that steps write
    lowering/     the ops of ``models/ops.py`` as steps for CPU and CUDA devices
"""
