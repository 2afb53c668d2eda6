"""From messages to a prompt, and from model output to reasoning, content and tool calls.

::

    messages.py            checks the messages of a request: ``ChatMessages``
    media_parts.py         pictures and sounds in messages, in every protocol's spelling
    media_placeholders.py  sentences in place of parts that the model cannot read
    prompt.py              renders the prompt of a conversation, with marks for its media
    system_prefix.py       finds where the system prompt ends among a prompt's token ids
    template/              chat templates: choice, sandboxed rendering, template variables
    tools/                 tool calls: prompts, constrained decoding, parsing of answers
"""
