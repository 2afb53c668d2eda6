"""Chat templates of model files: messages to prompts, rendered in a sandbox.

::

    template.py           ChatTemplate: renders messages; loads a model file's template
    override.py           a template that the user chose in place of the file's
    builtin_templates.py  templates for files without one, and how a file is matched to them
    role_formats.py       further built-in templates, used only by name
    content_form.py       whether a template reads contents as strings or as lists of parts
    variables.py          variables that a template reads; those that switch reasoning
    sandbox.py            the jinja2 environment
    renderer.py           a pool of rendering processes with time and memory limits
    render_process.py     the loop of such a process
"""
