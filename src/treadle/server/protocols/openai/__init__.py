"""OpenAI's endpoints: chat completions, completions and responses.

::

    chat_endpoint.py       the endpoint of chat completions, which also runs tools of MCP servers
    chat.py                chat completions: from a body to a request, from output to a response
    completions.py         legacy completions of raw prompts
    echo.py                log-probabilities of prompts, for completions
    end_reasoning.py       llama.cpp's end of a running answer's reasoning
    responses.py           ``/v1/responses``: bodies, response objects and events
    responses_endpoint.py  the endpoint of responses, with tools of MCP servers
    response_items.py      items of responses as chat messages
    response_tools.py      tools of responses as chat functions
    response_lookup.py     stored responses by id
    answer.py              fields that these and other protocols share
"""
