"""Protocols of other servers: a file or folder for each family of endpoints.

::

    openai/                 chat completions, completions and responses
    anthropic.py            Anthropic's messages
    ollama.py               Ollama's ``/api``
    llamacpp.py             llama.cpp's completion, infill, tokens, templates and state
    llamacpp_answer.py      llama.cpp's response format
    embeddings.py           vectors of texts, OpenAI's and llama.cpp's
    rerank.py               scores of documents for a query
    score.py                vLLM's scores of pairs of texts
    audio.py                transcriptions, refused by a model that does not transcribe
    models.py               ``/v1/models``
    lora_adapters.py        default scales of LoRA adapters
    control_vectors.py      default strengths of control vectors
    slot_actions.py         llama.cpp's slots: list, save, restore, erase
    kept_stream_actions.py  llama.cpp's streams that outlive their connection
    tool_servers.py         tools of MCP servers, for clients that call them
    vllm.py                 vLLM's version and tokenizer information
    metrics.py              ``/metrics`` for Prometheus
    answer_fields.py        fields that responses of several protocols share
"""
