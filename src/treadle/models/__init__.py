"""Models: configuration, traits of architectures, and graphs of ops.

::

    load.py           load_config: a file's header, checked, as a Config
    keys.py           ArchMetadata: range-checked access to an architecture's keys
    stored_config.py  open_config: a Config from disk, as an earlier process has read it
    config.py         Config, Layer: hyper-parameters of a model and of each layer; PoolSpec,
                      StateSpec: what layers keep between runs
    arch.py           Arch: the traits of an architecture
    archs/            a row of traits for each architecture
    graphs/           one file per data flow: how it is built, and how its keys are read
    mixers/           sublayers that pass information between tokens: attention, recurrences
    ffns/             sublayers that transform each token: FFNs, mixtures of experts
    layer.py          residual sums of a layer's sublayers, and their norms
    ops.py            Ops: the vocabulary of graphs, which each device implements
    structure.py      Graph, Sublayer: their tensors, and the check of a file against them
    rope.py           Rope: tables of rotary position embeddings
    rope_keys.py      keys of these tables

    drafters/             graphs of drafters that read the states of another model
    towers/               encoders of pictures and sound, and projectors
    lora.py               LoRA adapters
    switch.py             adapters within a model, which control tokens choose
    control_vector.py     control vectors
    stages.py             pipeline stages: consecutive parts of the layers
    pooling_head.py       matrices applied to pooled embeddings
    sentence.py           settings of sentence-transformers folders
    active_parameters.py  parameters that one token uses
    ignored_tensors.py    architectures that are not supported, and why
    unread_tensors.py     the warning about tensors that nothing reads
    digest.py             the hash of a configuration
"""
