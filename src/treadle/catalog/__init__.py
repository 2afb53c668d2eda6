"""The models on this machine: found, named, described and removed, without the network.

::

    stored.py       finds models in the hub's cache, and in the folder of TREADLE_MODELS
    names.py        gives each a short name, and finds the model that a short name means
    facts.py        reads a model's header: parameters, context, memory; stored for later listings
    records.py      last use and measured speeds of a model, in treadle's cache folder
    removal.py      removes a model, but no file that another revision needs

Downloads are in huggingface_hub's cache; treadle has no store of its own, and copies no file.
"""
