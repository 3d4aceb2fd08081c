"""Token ids to text as they come: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What turns ids into whole characters, as `jaxspec.model.text.tokenizer.Detokenizer` does."""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""
        ...

    def flush(self) -> str:
        """Returns what is left at the end."""
        ...


class StopMatcher:
    """Finds stop strings in text that comes in pieces, however it is cut.

    Text comes out once no stop string can begin in it any more. The stop string that is complete first wins; of those
    that end together, the longest.

    Args:
      stops: none of them empty.
      include_stop: whether what comes out ends with the stop string, or before it.

    Attributes:
      matched: the stop string found; nothing comes out after it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self._stops, self._include_stop = tuple(stops), include_stop
        # A stop string may still begin wherever the text so far ends with one of these.
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Adds text; returns what is certain now.

        Args:
          may_stop: whether a stop string that is complete with this text counts.
        """
        if self.matched is not None:
            return ""
        before = len(self._held)
        text = self._held + text
        # What was complete before did not count, or it would have been found then.
        places = {stop: text.find(stop, max(0, before + 1 - len(stop))) for stop in self._stops if may_stop}
        found = [(place + len(stop), -len(stop), stop) for stop, place in places.items() if place >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_stop else end - len(self.matched)]
        kept = next(
            (length for length in range(min(self._longest, len(text)), 0, -1) if text[-length:] in self._beginnings), 0
        )
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Turns one answer's tokens into text.

    Args:
      detokenizer: one for this answer alone.
      stops, include_stop: as in `StopMatcher`.
      min_tokens: so many tokens complete no stop string.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ):
        self._detokenizer, self._early = detokenizer, min_tokens
        self._matcher = StopMatcher(stops, include_stop)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is certain now."""
        may_stop = self._early <= 0
        self._early -= 1
        return self._matcher.push(self._detokenizer.push([token]), may_stop)

    def flush(self) -> str:
        """Ends the stream: returns what was held back; bytes of an unfinished character come out as U+FFFD."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
