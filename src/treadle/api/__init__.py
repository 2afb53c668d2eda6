"""The library API: what ``treadle`` exports, and parts of it that commands and the server use.

::

    model.py                  load, Model: generate, chat, embed, rerank, states, hooks
    session.py                Session: one sequence of the KV cache, fed and truncated
    generation.py             Generation: the iterator that generate and chat return
    tool_chat.py              Reply: a Generation split into reasoning, content, tool calls
    chat_completions.py       ChatCompletions: chats in the form of OpenAI's API
    speech.py                 load_speech, SpeechRecognizer: sound to text
    shared_models.py          load_shared: one model for all callers of the process

    embedding.py              embedding vectors: pooled states, dense matrices, cut, scaled
    rerank.py                 relevance scores of query-document pairs
    media.py                  pictures and sounds of prompts, as token ids and rows
    projector_choice.py       finds and opens a model's projector
    encoder_decoder.py        encoder-decoder models (T5): their encoder, refused settings
    control_vector.py         loads control vectors, and makes them from pairs of texts

    hooks.py                  trace, patch, states, attention weights, logit lens
    hook_pictures.py          attention weights and lenses as HTML
    step_diff.py              two models compared step by step
    transformers_reference.py a model compared with transformers' step by step

    options.py                checks of arguments, and the file that ``path`` means; Defaults of
                              answers: template, reasoning, sampling
    engine_plans.py           the plans that requests will need, to compile them in advance
    notebook.py               display of answers in notebooks
    summary.py                ``repr`` and notebook table of a model
"""
