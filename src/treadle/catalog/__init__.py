"""The models on this machine: found, named, described and removed, without the network.

::

    stored.py       finds models in the hub's cache, and in the folder of TREADLE_MODELS
    names.py        gives each a short name, and finds the model that a short name means
    facts.py        reads a model's header: parameters, context, memory; kept for the next listing
    records.py      last use and measured speeds of a model, in treadle's cache folder
    removal.py      removes a model, but no file that another revision needs

There is one store, huggingface_hub's cache: no file is copied.
"""
