"""Kernels that search for the scales of quantised blocks; their numpy twins are in ``formats/``.

::

    k_search.py  SearchKernel: base of all searches, and their descent
    offset.py    formats with scales and minimums (Q4_K, Q5_K ...)
    signed.py    formats with signed scales (Q6_K, Q4_0 ...)
    ladder.py    formats with a table of values and equally spaced scales
    codebook.py  formats with a table of points of four weights
    columns.py   a search's data in scratch; rounding to f16
    select.py    the search for a format
"""
