"""The server of a speech model: OpenAI's transcriptions and translations.

::

    speech_app.py             routes; health, models and metrics
    transcriptions.py         the endpoints of transcriptions and translations
    transcription_request.py  fields of the form, and the settings that they mean
    speech_service.py         state shared by the handlers
    speech_thread.py          the thread that transcribes for all requests
"""
