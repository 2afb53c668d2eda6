"""Small helpers for all packages, independent of models.

::

    caller_warnings.py  warnings routed to the caller whose request caused them
    fast_classes.py     ``dataclass``, ``NamedTuple``, ``cached_property``: faster, without locks
    fork_safety.py      locks that stay usable in a forked child
    gc_pause.py         the cyclic garbage collector, switched off in a block
    humanize.py         sizes, counts and reasons of file errors, as text for messages
    interrupts.py       blocks in which signal handlers are deferred
    python_process.py   interpreter, import path and settings of child processes
    text_overlap.py     length of a common prefix; overlap of a text and a stop string
    validate.py         checks of single values: integers, numbers, choices, flags, lists, paths
"""
