"""The KV cache: pages of keys and values that sequences with the same prefix share.

::

    cache.py           KVCache: sequences, their pages, prefix reuse, reservations
    page_pool.py       Pool: the pages of layers of one shape; StatePool: recurrent states, whose
                       slots and checkpoints StateSlots hands out
    prefix_tree.py     PageTree: full pages by the tokens that lead to them; eviction.
                       PrefixHit: how many prompt tokens were reused, and why reuse stopped
    media.py           MediaRegistry: pictures and sounds, whose rows are tokens of a text
    encoded_inputs.py  EncodedInputs: keys and values of prompts that an encoder has read
    target_cache.py    BorrowedCache: a drafter's read-only view of the cache of its target model
    disk/              pages and sessions in files
"""
