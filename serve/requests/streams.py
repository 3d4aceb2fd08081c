"""What comes out of the engine for one request, until its reader takes it.

Nothing here blocks the engine: what a slow reader has not taken is joined into one piece, which the answer's own limit
bounds. Everything runs on the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import RequestOutput, RequestStatistics
from jaxspec.engine.token_log_probs import TokenLogProb
from jaxspec.serve.requests.text_stream import TextStream
from jaxspec.serve.runtime.refusal import Refusal


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    Attributes:
      reason: why; a stop string that only the text shows counts as a stop.
      stop_token_id, stop_string: the one that stopped it; both None where nothing did.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass
class Piece:
    """What is new of one choice.

    Attributes:
      from_draft: how many of the tokens were drafted.
      log_probs: of `tokens`, where asked for.
      prompt_log_probs: of the prompt's tokens from the second on, once, where asked for.
      ending: with the last piece.
    """

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    from_draft: int = 0
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    ending: Ending | None = None


class ChoiceStream:
    """Turns the engine's outputs for one choice into pieces, and ends where a stop string does.

    Args:
      index: the choice's number.
      text: makes the text, or None where nobody wants any.
      include_stop: whether the text of a stop token is part of the text.
      depth: tokens that the drafter drafts in one pass.

    Attributes:
      ending: None until the answer ended.
      statistics: what speculation did in the rounds whose tokens are part of the answer.
    """

    def __init__(self, index: int, text: TextStream | None, include_stop: bool, depth: int):
        self.index = index
        self._text, self._include_stop, self._depth = text, include_stop, depth
        self._piece = Piece(index)
        self.ending: Ending | None = None
        self.statistics = RequestStatistics()

    def push(self, output: RequestOutput) -> None:
        """Adds what the engine brought; nothing after the end."""
        start = 0
        self._piece.prompt_log_probs += output.prompt_log_probs
        self.statistics.cached_tokens = output.cached_tokens
        for counts in output.rounds:
            if self.ending is not None:
                return
            tokens = output.tokens[start : start + counts.produced]
            start += len(tokens)
            last = start == len(output.tokens) and output.finish_reason is FinishReason.STOP
            kept = self._push_round(tokens, stop_token=last)
            self._piece.log_probs += output.log_probs[start - len(tokens) : start - len(tokens) + kept]
            accepted = min(counts.accepted, kept)
            self.statistics.record(replace(counts, produced=kept, accepted=accepted), self._depth)
            self._piece.from_draft += accepted
        if output.finish_reason is not None:
            self.end(Ending(output.finish_reason))

    def end(self, ending: Ending) -> None:
        """Ends the answer, unless it ended before."""
        if self.ending is None:
            if self._text is not None:
                self._piece.text += self._text.flush()
            matched = self._text.matched if self._text is not None else None
            if matched is not None:
                ending = Ending(FinishReason.STOP, stop_string=matched)
            self._piece.ending = self.ending = ending

    def take(self) -> Piece | None:
        """Returns what came since the last time, or None."""
        piece = self._piece
        if not (piece.tokens or piece.text or piece.ending):
            return None
        self._piece = Piece(self.index)
        return piece

    def _push_round(self, tokens: Sequence[int], stop_token: bool) -> int:
        """Adds one round's tokens; returns how many of them are part of the answer."""
        for place, token in enumerate(tokens, start=1):
            self._piece.tokens.append(token)
            ends = stop_token and place == len(tokens)
            if self._text is not None and not (ends and not self._include_stop):
                self._piece.text += self._text.push(token)
                if self._text.matched is not None:
                    self.end(Ending(FinishReason.STOP, stop_string=self._text.matched))
                    return place
            if ends:
                self.end(Ending(FinishReason.STOP, stop_token_id=token))
        return len(tokens)


class RequestStream:
    """All choices of one request, for the one coroutine that reads them.

    Attributes:
      id: the request's.
      choices: all of them, in order.
    """

    def __init__(self, id: str, choices: Sequence[ChoiceStream]):
        self.id, self.choices = id, choices
        self._news = asyncio.Event()
        self._failure: Refusal | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._failure is not None or all(choice.ending is not None for choice in self.choices)

    @property
    def failed(self) -> bool:
        """Whether it ended with a status."""
        return self._failure is not None

    def push(self, choice: ChoiceStream, output: RequestOutput) -> None:
        """Adds what the engine brought for one choice."""
        choice.push(output)
        self._news.set()

    def end(self, reason: FinishReason) -> None:
        """Ends every choice that still runs."""
        for choice in self.choices:
            choice.end(Ending(reason))
        self._news.set()

    def fail(self, refusal: Refusal) -> None:
        """Ends the request with a status."""
        self._failure = self._failure or refusal
        self._news.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields everything new, joined by choice, until all choices ended.

        Raises:
          Refusal: the request failed; what came before that is still given first.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            done = self.ended
            for choice in self.choices:
                piece = choice.take()
                if piece is not None:
                    yield piece
            if self._failure is not None:
                raise self._failure
            if done:
                return
