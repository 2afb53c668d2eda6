"""Speculative decoding: n-grams, draft models and multi-token prediction.

::

    proposer.py     Drafting: chooses the drafts of each decoding step
    ngram.py        n-gram lookup; acceptance rates, step times, and whether a draft pays
    open.py         opens the drafter of a file, by its architecture
    draft_model.py  Drafter: a second, smaller model; base class of the drafters below
    mtp.py          a multi-token-prediction layer, in the model's file or a file of its own
    tapped.py       hidden states from between the model's layers, for EAGLE 3 and DFlash
    eagle3.py       EAGLE 3 heads
    dflash.py       DFlash 1 and 2 and DSpark block drafters
    selector.py     the choice among candidates of a block (DFlash 2)
    assistant.py    Gemma 4 assistants, which read the model's KV cache
"""
