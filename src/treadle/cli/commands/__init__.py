"""The commands: ``NAME.py`` has the click command NAME, and is imported only when it is called.

::

    run.py, chat.py, batch.py     text: a completion, a conversation, a file of requests
    serve.py, cluster.py, ps.py   servers: on this machine, on several, their state
    launch.py                     a coding agent on a local model
    embed.py, rerank.py           vectors of texts; scores of documents
    transcribe.py                 sound to text
    pull.py, list.py, show.py, rm.py        the models on this machine
    inspect.py, plan.py, tokenize.py        a file's contents, its steps, its tokens
    diff.py, perplexity.py        two models step by step; quality on a text
    bench.py, doctor.py, check.py           speed, capabilities, correctness of this machine
    tune.py, kernels.py, warm.py  tile sizes, compiled kernels, compilation ahead
    convert.py, quantize.py, imatrix.py     files: other formats, smaller ones, importances
    control_vector.py, bundle.py  control vectors; program and model in one file
"""
