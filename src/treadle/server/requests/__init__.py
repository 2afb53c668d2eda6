"""From a request's body to generations, and from their output to events.

::

    service.py             state shared by all handlers of one model
    generation_request.py  the fields of generation requests that all protocols share
    chat_prompt.py         from chat messages to prompt ids
    request_media.py       pictures and sounds in prompts
    token_rules.py         vLLM's allowed and forbidden tokens
    tools.py               the tools that the model may or must call
    ignored_fields.py      known fields without effect, and the warnings about them
    admission.py           whether the server can take a request now
    engine_thread.py       the thread that steps the scheduler
    client_slots.py        llama.cpp's numbered slots
    request_stream.py      the output of one HTTP request, in the event loop
    http_responses.py      ASGI responses: whole as JSON, or streamed
    kept_streams.py        streamed answers that outlive their connection
    response_store.py      the latest ``/v1/responses``, in memory
    tool_servers.py        tools of MCP servers that a request asks for
    tool_turns.py          the answers to one request, with calls of such tools in between
    stats.py               counters and histograms
"""
