"""Why an answer ended."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended; each equals its name in the APIs."""

    STOP = "stop"  # an end or stop token was chosen
    LENGTH = "length"  # max_tokens, or the context, is used up
    ABORT = "abort"
    GRAMMAR = "grammar"  # the grammar allowed no token, so the last ones were chosen regardless of it
