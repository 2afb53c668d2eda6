"""Quantisation of a model's file.

::

    mixes.py   llama.cpp's mixes: which format for which role of a tensor
    plan.py    Recipe: the format of each tensor of a file, from a mix and the user's rules
    write.py   writes the quantised file
    imatrix/   importance matrices: collected from a text, and as files
"""
