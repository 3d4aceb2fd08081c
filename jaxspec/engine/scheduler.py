"""Who runs next: requests in the queue and in slots, and the cache pages that they hold. All of it on the host."""

import bisect
import time

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.page_allocator import PageAllocator
from jaxspec.engine.programs import bucket
from jaxspec.engine.request import Request

SMALLEST_CONTEXT_BUCKET = 256  # tokens


class Schedule:
    """The requests of one engine.

    Args:
      config: sizes.
      page_count: pages of the cache.
      max_context: tokens that a request may reach.

    Attributes:
      waiting: requests without a slot, in the order of their turns.
      running: by slot.
      open: all of them, by id.
      pages: of the cache.
      rounds_per_call, tokens_per_round: what a decoding call may commit.
    """

    def __init__(self, config: EngineConfig, page_count: int, max_context: int):
        self._config, self._page_count, self._max_context = config, page_count, max_context
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.open: dict[int, Request] = {}
        self.pages = PageAllocator(page_count, config.page_size, config.keep_prefixes)
        self.rounds_per_call = self.tokens_per_round = 1

    @property
    def prefilling(self) -> list[Request]:
        """Requests in slots whose prompts are not done."""
        return [request for request in self.running.values() if request.to_prefill > 0]

    @property
    def decoding(self) -> list[Request]:
        """Requests in slots that a decoding call may bring tokens for."""
        return [r for r in self.running.values() if r.to_prefill <= 0 and not r.certain_to_finish]

    def queue(self, request: Request) -> None:
        """Opens a request."""
        request.queued_at = time.perf_counter()
        bisect.insort(self.waiting, request, key=Request.turn)
        self.open[request.id] = request

    def assign(self) -> list[Request]:
        """Gives waiting requests slots and the pages of their prompts, by priority, then first come first served.

        A prompt whose next page is being processed for another request waits until it can share that.

        Returns:
          the requests that got a slot.
        """
        free = [slot for slot in range(self._config.slots) if slot not in self.running]
        assigned: list[Request] = []
        for request in list(self.waiting):
            if not free:
                break
            if not request.awaits_prompt_log_probs:  # or nobody would compute them
                request.pages = self.pages.share(request.sequence[:-1])
                request.prefilled = len(request.pages) * self._config.page_size
            if self._next_page_under_way(request):
                self._give_back_pages(request)
                continue
            if not self.reserve(request):
                self._give_back_pages(request)
                break
            self.waiting.remove(request)
            if not request.generated:
                request.statistics.cached_tokens = request.prefilled
                request.queued_seconds = time.perf_counter() - request.queued_at
            request.slot = free.pop(0)
            self.running[request.slot] = request
            assigned.append(request)
        return assigned

    def reserve(self, request: Request) -> bool:
        """Makes sure that the request's pages hold whatever the dispatched calls and the next one can commit."""
        reach = request.reach(self.tokens_per_round, self.rounds_per_call)
        pages = self.pages.take(max(self._pages_for(reach) - len(request.pages), 0))
        if pages is None:
            return False
        request.pages += pages
        return True

    def processed(self, request: Request, tokens: int) -> None:
        """Counts tokens whose processing was dispatched; whole pages of them can be shared from now on."""
        request.prefilled += tokens
        request.pages = self.pages.keep(request.sequence[: request.prefilled], request.pages)

    def pause_last(self) -> None:
        """Puts the running request whose turn is last back into the queue, with what it has produced.

        Noise is keyed by position, so it resumes with the very tokens it would have had.
        """
        last = max(self.running.values(), key=Request.turn)
        self._release(last)
        last.prompt_rows = []
        bisect.insort(self.waiting, last, key=Request.turn)

    def close(self, request: Request) -> None:
        """Ends a request, wherever it is."""
        if request.slot is None:
            self.waiting.remove(request)
        self._release(request)
        del self.open[request.id]

    def batch_bucket(self, requests: list[Request]) -> int:
        """The batch size of a call over these requests."""
        return next(size for size in self._config.batch_sizes if size >= len(requests))

    def page_table(self, requests: list[Request], batch: int) -> np.ndarray:
        """Their pages, int32 [batch, pages], in a width that few programs are compiled for."""
        smallest = max(1, SMALLEST_CONTEXT_BUCKET // self._config.page_size)
        width = bucket(max(len(r.pages) for r in requests), self._pages_for(self._max_context), smallest)
        table = np.full((batch, width), self._page_count, np.int32)  # one past the last page: nobody's
        for row, request in enumerate(requests):
            table[row, : len(request.pages)] = request.pages
        return table

    def _next_page_under_way(self, request: Request) -> bool:
        end = request.prefilled + self._config.page_size
        if request.awaits_prompt_log_probs or not self._config.keep_prefixes or end >= len(request.sequence):
            return False
        beginning = request.sequence[:end]
        return any(other.sequence[:-1][:end] == beginning for other in self.prefilling)

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

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)
