"""The scripted conversation of the demo.

The tiny model answers with random letters. All that matters is that every turn repeats all earlier
turns, as in a chat.
"""

from __future__ import annotations

SYSTEM = (
    "You are the night-shift assistant of a small observatory. You know the dome, the two "
    "telescopes, the weather mast and the log book. Answer in short sentences, give times in UTC, "
    "and say so when a value was estimated. Never move the dome while somebody is on the ladder. "
    "If the wind is above fourteen metres per second, or rain is closer than ten kilometres, close "
    "first and explain afterwards. Write every closing into the log book with its reason."
)

QUESTIONS = (
    "Good evening. Which targets are planned for tonight, and in which order should we take them?",
    "The humidity went from 61 to 74 percent in an hour. Is that a reason to close already?",
    "The guide camera lost its star twice. What would you check first, and what would you log?",
    "We have forty minutes left before dawn. Which target gives the most for the time?",
    "Thank you. Please write the summary of the night for the day crew, with all closings.",
)

ANSWER_TOKENS = 40
