"""Who runs next: requests in the queue and in slots, and the cache pages that they hold. All of it on the host.

The scheduler alone moves a request from state to state: waiting, prefilling, decoding, finished, and back to waiting
where pages run out.
"""

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import EngineConfig
from jaxspec.engine.buckets import SMALLEST_CHUNK, bucket
from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.page_allocator import PageAllocator
from jaxspec.engine.request import Request, RequestState

CALLS_AHEAD = 2  # decoding calls dispatched before the oldest is read back
PREFILL_TOKENS = 8192  # of all requests in one prefill call


@dataclass(frozen=True)
class PromptPart:
    """The next `count` tokens of a request's prompt, from position `start` on."""

    request: Request
    start: int
    count: int


class Scheduler:
    """The requests of one engine.

    Args:
      config: sizes.
      page_count: pages of the cache.

    Attributes:
      waiting: requests without a slot, in the order of their turns.
      running: by slot.
      open: all of them, by id.
      pages: of the cache.
      rounds_per_call, tokens_per_round: what a decoding call may commit.
    """

    def __init__(self, config: EngineConfig, page_count: int):
        self._config = config
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.open: dict[int, Request] = {}
        self.pages = PageAllocator(page_count, config.page_size, config.keep_prefixes)
        self.rounds_per_call = self.tokens_per_round = 1

    @property
    def prefilling(self) -> list[Request]:
        """Requests in slots whose prompts are not done."""
        return [request for request in self.running.values() if request.state == RequestState.PREFILLING]

    @property
    def decoding(self) -> list[Request]:
        """Requests in slots that a decoding call may bring tokens for."""
        return [r for r in self.running.values() if r.state == RequestState.DECODING and not r.certain_to_finish]

    @property
    def calls_ahead(self) -> int:
        """How many decoding calls may be in flight; a grammar must see every token before it says what may follow."""
        return 1 if any(request.matcher is not None for request in self.running.values()) else CALLS_AHEAD

    def queue(self, request: Request) -> None:
        """Opens a request."""
        request.queued_at = time.perf_counter()
        bisect.insort(self.waiting, request, key=Request.turn)
        self.open[request.id] = request

    def assign(self) -> list[Request]:
        """Gives waiting requests slots and the pages of their prompts, by priority, then first come first served.

        A prompt whose next page is being processed for another request waits until it can share that.

        Returns:
          the requests whose whole context turned out to be in the cache, which decode next.
        """
        free = [slot for slot in range(self._config.slots) if slot not in self.running]
        ready: list[Request] = []
        for request in list(self.waiting):
            if not free:
                break
            if not request.awaits_prompt_log_probs:  # or nobody would compute them
                request.pages = self.pages.share(request.sequence[:-1])
                request.prefilled = len(request.pages) * self._config.page_size
            if self._next_page_under_way(request):
                self._give_back_pages(request)
                continue
            if not self._reserve(request):
                self._give_back_pages(request)
                break
            self.waiting.remove(request)
            if not request.generated:
                request.statistics.cached_tokens = request.prefilled
                request.queued_seconds = time.perf_counter() - request.queued_at
            request.slot = free.pop(0)
            self.running[request.slot] = request
            if request.state == RequestState.DECODING:
                ready.append(request)
        return ready

    def next_prefill(self) -> list[PromptPart]:
        """The next chunk of every prompt that is not done, as far as one call's bound allows."""
        pending = self.prefilling
        if not pending:
            return []
        longest = min(max(r.to_prefill for r in pending), self._config.prefill_chunk)
        chunk = bucket(longest, self._config.prefill_chunk, SMALLEST_CHUNK)
        sizes = self._config.batch_sizes
        # The largest batch within the bound on tokens, or the smallest there is.
        most = max((size for size in sizes if size * chunk <= PREFILL_TOKENS), default=sizes[0])
        return [PromptPart(r, r.prefilled, min(r.to_prefill, chunk)) for r in pending[:most]]

    def prefilled(self, parts: Sequence[PromptPart]) -> list[Request]:
        """Notes that the parts' processing was dispatched; whole pages of them can be shared from now on.

        Returns:
          the requests whose prompts are done, which decode next.
        """
        for part in parts:
            request = part.request
            request.prefilled += part.count
            request.pages = self.pages.keep(request.sequence[: request.prefilled], request.pages)
        return [part.request for part in parts if part.request.state == RequestState.DECODING]

    def next_decode(self) -> list[Request] | None:
        """The requests that decode next, with pages for whatever the calls in flight and the next one can commit.

        Returns:
          None where pages are lacking: those of finished calls, or `pause_last`, make room.
        """
        requests = self.decoding
        return requests if all(self._reserve(request) for request in requests) else None

    def dispatched(self, requests: Sequence[Request], rounds: int) -> None:
        """Notes that a decoding call of so many rounds was dispatched for the requests."""
        for request in requests:
            request.in_flight += rounds

    def read_back(self, request: Request, rounds: int, tokens: Sequence[int], stopped: bool) -> bool:
        """Notes what a decoding call brought for a request.

        Args:
          rounds: of the call.
          tokens: the new ones.
          stopped: whether the device ended the request with the last of them.
        Returns:
          whether they count: nothing does that comes after a request was closed or aborted.
        """
        request.in_flight -= rounds
        if request.state == RequestState.FINISHED:
            return False
        request.generated += tokens
        request.prefilled += len(tokens)
        if request.matcher is not None:
            request.matcher.advance(list(tokens))
        if request.matcher is not None and request.matcher.failed:
            self._close(request, FinishReason.GRAMMAR)
        elif stopped:
            ended = request.generated[-1] in request.stop_ids
            self._close(request, FinishReason.STOP if ended else FinishReason.LENGTH)
        return True

    def pause_last(self) -> None:
        """Puts the running request whose turn is last back into the queue, with what it has produced.

        Noise is keyed by position, so it resumes with the very tokens it would have had.
        """
        last = max(self.running.values(), key=Request.turn)
        self._release(last)
        last.prompt_rows = []
        bisect.insort(self.waiting, last, key=Request.turn)

    def abort(self, request_id: int) -> None:
        """Ends a request, wherever it is; `take_aborted` gives its slot and pages free.

        Raises:
          ValueError: it is not open.
        """
        request = self.open.get(request_id)
        if request is None:
            raise ValueError(f"request_id: found {request_id}, expected an open request")
        request.finish_reason = FinishReason.ABORT

    def take_aborted(self) -> list[Request]:
        """Closes the requests that were aborted since the last time."""
        aborted = [r for r in self.open.values() if r.state == RequestState.FINISHED]
        for request in aborted:
            self._close(request, FinishReason.ABORT)
        return aborted

    def check_progress(self) -> None:
        """Raises RuntimeError where requests wait although nothing runs: pages were lost."""
        if self.waiting and not self.running:
            raise RuntimeError(
                f"engine: {len(self.waiting)} request(s) wait with every slot free and {self.pages.free} of "
                f"{self.pages.count} pages; pages were lost, which is a fault of the engine"
            )

    def _reserve(self, request: Request) -> bool:
        """Makes sure that the request's pages hold whatever the dispatched calls and the next one can commit."""
        reach = request.reach(self.tokens_per_round, self.rounds_per_call)
        pages = self.pages.take(max(self.pages.holding(reach) - len(request.pages), 0))
        if pages is None:
            return False
        request.pages += pages
        return True

    def _next_page_under_way(self, request: Request) -> bool:
        end = request.prefilled + self._config.page_size
        if request.awaits_prompt_log_probs or not self._config.keep_prefixes or end >= len(request.sequence):
            return False
        beginning = request.sequence[:end]
        return any(other.sequence[:-1][:end] == beginning for other in self.prefilling)

    def _close(self, request: Request, reason: FinishReason) -> None:
        if request.slot is None:
            self.waiting.remove(request)
        request.finish_reason = reason
        self._release(request)
        del self.open[request.id]

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            del self.running[request.slot]
        request.slot = None
        # What a call in flight may still write lies past the tokens that were read back.
        request.pages = self.pages.keep(request.sequence[: request.prefilled], request.pages)
        self._give_back_pages(request)

    def _give_back_pages(self, request: Request) -> None:
        self.pages.give_back(request.pages)
        request.pages = []
        request.prefilled = 0
