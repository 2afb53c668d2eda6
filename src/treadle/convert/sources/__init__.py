"""The interface of checkpoint readers, and what several of them share.

::

    source.py           Source and SourceTensor
    gguf.py             GGUF files as sources
    derived_tensors.py  DerivationRule: tensors that GGUF stores in another form
    llama_names.py      Meta's tensor names and hyper-parameters
    draft_for.py        keys that a drafter takes from its target model
    check_finite.py     checks for infinities and NaNs, in any format
"""
