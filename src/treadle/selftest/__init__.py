"""``treadle check``: proof that this machine computes what the kernels' numpy twins say.

``check_model(model)`` returns a ``CheckReport``: each kernel of the model's plans beside its twin,
the same bits on any number of threads, a text, and speeds beside this machine's peaks.
"""
