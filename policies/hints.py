"""The hints that a policy may receive in ``EntryInfo.hints`` and through ``EvictionPolicy.advise``.

A client sends them in ``kv_transfer_params``. All are optional. A wrong hint may cost hits, but
never changes an answer. Some are known when a chunk is stored (``EntryInfo.hints``), the others
only when the request ends (``advise``).

| name | value | known | meaning |
|---|---|---|---|
| ``SESSION`` | any hashable | stored | requests of one conversation carry the same value |
| ``ONE_SHOT`` | bool | stored | this prompt will not be sent again |
| ``PINNED`` | bool | stored, ended | keep as long as possible, for example a shared system prompt |
| ``PRIORITY`` | ``LOW``, ``HIGH`` | stored | how important hits are to the client |
| ``SESSION_END`` | bool | ended | the conversation is over |
| ``TOOL_CALL`` | bool | ended | the answer called a tool; its result comes back as a new prompt |
| ``RETURN_S`` | float | ended | seconds after which the client expects to be back |
"""

from __future__ import annotations

SESSION = "session"
ONE_SHOT = "one_shot"
PINNED = "pinned"
SESSION_END = "session_end"
TOOL_CALL = "tool_call"
RETURN_S = "return_s"
PRIORITY = "priority"

LOW, NORMAL, HIGH = PRIORITIES = ("low", "normal", "high")
NAMES = (SESSION, ONE_SHOT, PINNED, SESSION_END, TOOL_CALL, RETURN_S, PRIORITY)
