"""Graphs of drafters that read the states of another model.

::

    target.py          parts that these drafters share, and their pairing with the model
    eagle3.py          EAGLE 3: one layer, one token after the other
    dflash.py          DFlash 1 and 2, DSpark: a block of tokens at once
    dspark_streams.py  DSpark of DeepSeek V4, on several streams of states
"""
