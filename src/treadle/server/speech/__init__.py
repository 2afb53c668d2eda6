"""The server of a speech model: OpenAI's transcriptions and translations."""
