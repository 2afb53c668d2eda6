"""Small helpers for all packages, independent of models.

::

    cached_property.py  ``functools.cached_property`` without a lock
    caller_warnings.py  warnings routed to the caller whose request caused them
    digest.py           BLAKE2 without OpenSSL
    fast_dataclass.py   ``dataclass`` that compiles ``__init__`` for classes of many objects
    fast_named_tuple.py ``NamedTuple``, made in the same way
    fork_safety.py      locks that stay usable in a forked child
    gc_pause.py         the cyclic garbage collector, switched off in a block
    humanize.py         sizes, counts and reasons of file errors, as text for messages
    interrupts.py       blocks in which signal handlers are deferred
    python_process.py   interpreter, import path and settings of child processes
    text_overlap.py     length of a common prefix; overlap of a text and a stop string
    validate.py         checks of single values: integers, numbers, choices, flags, lists
"""
