"""The scheduler on its own: no device, no model, and a random world that never loses a page or a token."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine.finish_reason import FinishReason
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.scheduler import CALLS_AHEAD, PREFILL_TOKENS, Scheduler

PAGE = 4
END = 7


def scheduler(pages: int = 64, **sizes: Any) -> Scheduler:
    sizes = {"slots": 4, "page_size": PAGE, "prefill_chunk": 32} | sizes
    return Scheduler(EngineConfig(**sizes), pages)


def request(id: int, prompt: int | list[int] = 10, limit: int = 20, **more: Any) -> Request:
    tokens = [100 * id + place for place in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(id, tokens, SamplingParams(max_tokens=limit), limit, seed=0, stop_ids=(END,), **more)


def queued(made: Scheduler, *requests: Request) -> list[Request]:
    for one in requests:
        made.queue(one)
    return list(requests)


def prefill_all(made: Scheduler) -> list[Request]:
    done = []
    while parts := made.next_prefill():
        done += made.prefilled(parts)
    return done


def test_it_imports_neither_jax_nor_flax() -> None:
    code = "import sys, jaxspec.engine.scheduler; print([m for m in ('jax', 'flax', 'grpc') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_request_goes_from_state_to_state() -> None:
    made = scheduler()
    (one,) = queued(made, request(0, 10))
    assert one.state == RequestState.WAITING
    assert made.assign() == []
    assert one.state == RequestState.PREFILLING
    (part,) = made.next_prefill()
    assert (part.request, part.start, part.count) == (one, 0, 9)  # all but the anchor
    assert made.prefilled([part]) == [one]
    assert one.state == RequestState.DECODING
    assert made.next_decode() == [one]
    made.dispatched([one], 1)
    assert made.read_back(one, 1, [1, 2, END], stopped=True)
    assert (one.state, one.finish_reason) == (RequestState.FINISHED, FinishReason.STOP)
    assert not made.open
    assert not made.running
    assert made.pages.free == made.pages.count


def test_slots_go_by_priority_and_then_by_turn() -> None:
    made = scheduler(slots=2)
    low, urgent, late = queued(made, request(0), request(1, priority=2), request(2))
    made.assign()
    assert sorted(made.running.values(), key=lambda r: r.id) == [low, urgent]
    assert made.waiting == [late]
    made.abort(low.id)
    assert made.take_aborted() == [low]
    made.assign()
    assert low.state == RequestState.FINISHED
    assert late.slot is not None


def test_one_that_lacks_pages_holds_up_those_behind_it() -> None:
    made = scheduler(pages=6)
    large, small = queued(made, request(0, 40), request(1, 4))
    made.assign()
    assert made.waiting == [large, small]
    with pytest.raises(RuntimeError, match=r"2 request\(s\) wait with every slot free and 6 of 6 pages; pages were"):
        made.check_progress()


def test_a_prefill_call_is_bounded() -> None:
    made = scheduler(pages=4096, slots=64, prefill_chunk=1024)
    queued(made, *(request(index, 3000) for index in range(10)))
    made.assign()
    parts = made.next_prefill()
    assert len(parts) == 4  # the batch sizes are 1, 4, 16 and 64
    assert sum(part.count for part in parts) <= PREFILL_TOKENS
    assert all((part.start, part.count) == (0, 1024) for part in parts)
    made.prefilled(parts)
    assert all(part.start == 1024 for part in made.next_prefill())


def test_equal_beginnings_are_processed_once() -> None:
    made = scheduler()
    first, second = queued(made, request(0, list(range(30))), request(1, list(range(30))))
    made.assign()
    assert second.state == RequestState.WAITING, "it will share what is being processed"
    prefill_all(made)
    ready = made.assign()
    assert second.statistics.cached_tokens == 28  # seven whole pages of the 29 tokens before the anchor
    assert first.pages[:7] == second.pages[:7]
    assert ready == []
    assert prefill_all(made) == [second]


def test_a_context_that_is_cached_whole_is_ready_at_once() -> None:
    made = scheduler()
    (first,) = queued(made, request(0, list(range(29))))
    made.assign()
    prefill_all(made)
    (second,) = queued(made, request(1, list(range(29))))
    assert made.assign() == [second]
    assert second.state == RequestState.DECODING
    assert first.state == RequestState.DECODING


def test_calls_reserve_pages_for_all_that_they_may_commit() -> None:
    made = scheduler(pages=8)
    made.tokens_per_round = 8
    (one,) = queued(made, request(0, 9, limit=23))  # 32 tokens in all: every page there is
    made.assign()
    prefill_all(made)
    for rounds in range(3):
        assert made.next_decode() == [one]
        made.dispatched([one], 1)
        assert len(one.pages) * PAGE >= min(8 + 8 * (rounds + 1), 32)
    assert one.in_flight == 3


def test_the_last_in_turn_is_paused_and_goes_on_where_it_was() -> None:
    made = scheduler(pages=8)
    made.tokens_per_round = 8
    first, second = queued(made, request(0, 9), request(1, 9))
    made.assign()
    prefill_all(made)
    assert made.next_decode() is not None
    made.dispatched([first, second], 1)
    assert made.next_decode() is None, "ten pages would be needed"
    for one in (first, second):
        assert made.read_back(one, 1, list(range(50, 58)), stopped=False)
    if made.next_decode() is None:
        made.pause_last()
    assert made.waiting == [second]
    assert second.generated == list(range(50, 58))
    assert made.next_decode() == [first]
    made.abort(first.id)
    made.take_aborted()
    made.assign()
    prefill_all(made)
    assert made.next_decode() == [second]


def test_nothing_counts_after_an_abort() -> None:
    made = scheduler()
    (one,) = queued(made, request(0))
    made.assign()
    prefill_all(made)
    made.dispatched([one], 1)
    made.abort(one.id)
    assert not made.read_back(one, 1, [1, 2], stopped=False)
    assert one.generated == []
    assert made.take_aborted() == [one]
    assert one.finish_reason == FinishReason.ABORT
    with pytest.raises(ValueError, match="request_id: found 0, expected an open request"):
        made.abort(0)


def test_a_request_that_surely_ends_is_not_dispatched_again() -> None:
    made = scheduler()
    (one,) = queued(made, request(0, limit=2))
    made.assign()
    prefill_all(made)
    made.dispatched([one], 1)
    assert made.next_decode() == [one]
    made.dispatched([one], 1)
    assert made.next_decode() == []
    made.read_back(one, 1, [4], stopped=False)
    made.read_back(one, 1, [4], stopped=True)
    assert one.finish_reason == FinishReason.LENGTH


class Matcher:
    """A grammar that breaks at a given token."""

    def __init__(self, broken_by: int):
        self.broken_by, self.failed = broken_by, False

    def advance(self, tokens: list[int]) -> None:
        self.failed |= self.broken_by in tokens


def test_a_grammar_sees_every_token_before_the_next_call() -> None:
    made = scheduler()
    one, two = queued(made, request(0), request(1))
    assert made.calls_ahead == CALLS_AHEAD
    one.matcher = Matcher(broken_by=9)  # type: ignore[assignment]
    made.assign()
    assert made.calls_ahead == 1
    prefill_all(made)
    made.dispatched([one, two], 1)
    made.read_back(one, 1, [9], stopped=False)
    assert one.finish_reason == FinishReason.GRAMMAR
    assert made.calls_ahead == CALLS_AHEAD


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_a_random_world_ends_with_every_answer_whole_and_every_page_free(data: st.DataObject) -> None:
    """A device that commits between 1 and L + 1 tokens a round, few pages, aborts, and calls in flight."""
    pages, depth = data.draw(st.integers(12, 24)), data.draw(st.integers(0, 5))
    made = scheduler(pages=pages, slots=3, keep_prefixes=data.draw(st.booleans()))
    made.tokens_per_round = depth + 1
    plans = data.draw(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 20), st.integers(0, 2)), max_size=7))
    requests = [
        request(index, [data.draw(st.integers(0, 1)) for _ in range(prompt)], limit, priority=priority)
        for index, (prompt, limit, priority) in enumerate(plans)
    ]
    coming, flight, aborted = list(requests), [], set()

    def collect() -> None:
        call = flight.pop(0)
        for one, start in call:
            done = len(one.generated)
            # What the device commits is a matter of the request's place alone.
            count = min(1 + (one.id + start) % (depth + 1), one.limit - done)
            tokens = [1000 * (one.id + 1) + place for place in range(done, done + count)] if count > 0 else []
            made.read_back(one, 1, tokens, stopped=bool(tokens) and done + count == one.limit)

    for turn in range(2000):
        if coming and data.draw(st.booleans()):
            made.queue(coming.pop(0))
        if made.open and turn % 17 == 16 and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(made.open)))
            made.abort(victim)
            aborted.add(victim)
        made.take_aborted()
        made.assign()
        if parts := made.next_prefill():
            made.prefilled(parts)
        while (ready := made.next_decode()) is None:
            free = made.pages.free
            while flight:
                collect()
            if made.pages.free == free:
                made.pause_last()
        if ready:
            for one in ready:
                assert len(one.pages) * PAGE >= one.reach(made.tokens_per_round, 1)
            made.dispatched(ready, 1)
            flight.append([(one, turn) for one in ready])
        collected = bool(flight) and (len(flight) >= CALLS_AHEAD or not ready)
        if collected:
            collect()
        held = [page for one in made.running.values() for page in one.pages]
        assert len(set(held)) + made.pages.free == pages, "a page is held, or free, and never lost"
        if not collected:
            made.check_progress()
        if not (coming or made.open or flight):
            break
    assert not made.open
    assert made.pages.free == pages
    for one in requests:
        if one.id not in aborted:
            assert one.finish_reason == FinishReason.LENGTH
            assert one.generated == [1000 * (one.id + 1) + place for place in range(one.limit)]
