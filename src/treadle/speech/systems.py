"""What the system says in the middle of a conversation: so agents tell what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.text.messages import joined


def system_first(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One message of the system's, and that the first: many templates raise on a later one, or
    write none. The last message of a conversation becomes the user's: without it an answer before
    it would be gone on with.
    """
    made = [dict(message) for message in messages]
    late = [i for i, message in enumerate(made) if i and message.get("role") == "system"]
    if late and late[-1] == len(made) - 1 and made[-2].get("role") == "assistant":
        made[late.pop()]["role"] = "user"
    if not late:
        return made
    first = [0] if made[0].get("role") == "system" else []
    said = [joined(made[i].get("content")) for i in (*first, *late)]
    others = [made[i] for i in range(len(made)) if i not in (*first, *late)]
    return [{"role": "system", "content": "\n\n".join(filter(None, said))}, *others]
