"""``TreadleChatGenerator``: a chat generator of Haystack, in the same process."""

from haystack_integrations.components.generators.treadle.chat_generator import TreadleChatGenerator

__all__ = ["TreadleChatGenerator"]
