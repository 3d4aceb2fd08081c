"""The page allocator: what is shared holds what it says, and no page is lost or held twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.page_allocator import PageAllocator

SIZE = 2


class Model:
    """Requests over an allocator; `written` is what an engine would have put into each page."""

    def __init__(self, pages: int):
        self.allocator = PageAllocator(pages, SIZE)
        self.written: dict[int, tuple[int, ...]] = {}
        self.held: list[tuple[list[int], list[int]]] = []

    def begin(self, tokens: list[int]) -> bool:
        free = self.allocator.free
        shared = self.allocator.share(tokens)
        for place, page in enumerate(shared):
            assert self.written[page] == tuple(tokens[: (place + 1) * SIZE]), "the whole beginning is the same"
        more = self.allocator.take(-(-len(tokens) // SIZE) - len(shared))
        if more is None:
            self.allocator.give_back(shared)
            assert self.allocator.free == free
            return False
        assert not {*more} & {page for _, pages in self.held for page in pages}
        assert not {*more} & {*shared}
        pages = shared + more
        for place in range(len(shared), len(tokens) // SIZE):
            self.written[pages[place]] = tuple(tokens[: (place + 1) * SIZE])
        self.held.append((tokens, pages))
        return True

    def end(self, index: int, processed: int) -> None:
        tokens, pages = self.held.pop(index)
        pages = self.allocator.keep(tokens[:processed], pages)
        for place in range(processed // SIZE):
            assert self.written[pages[place]] == tuple(tokens[: (place + 1) * SIZE])
        self.allocator.give_back(pages)

    def check(self, total: int) -> None:
        held = {page for _, pages in self.held for page in pages}
        assert self.allocator.free == total - len(held)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_requests_share_only_what_is_theirs(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    model = Model(total)
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.integers(0, 5))
        if action == 0 and model.held:
            index = data.draw(st.integers(0, len(model.held) - 1))
            model.allocator.keep([], model.held[index][1])
        elif action <= 2 and model.held:
            index = data.draw(st.integers(0, len(model.held) - 1))
            model.end(index, data.draw(st.integers(0, len(model.held[index][0]))))
        elif action == 3:
            model.allocator.forget()
        else:
            model.begin(data.draw(tokens))
        model.check(total)
    while model.held:
        model.end(0, len(model.held[0][0]))
    assert model.allocator.free == total
    assert sorted(model.allocator.take(total) or []) == list(range(total))


def finish(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    shared = allocator.share(tokens)
    pages = shared + (allocator.take(-(-len(tokens) // SIZE) - len(shared)) or [])
    pages = allocator.keep(tokens, pages)
    allocator.give_back(pages)
    return pages


def test_the_longest_unused_prefix_gives_way_from_its_end() -> None:
    allocator = PageAllocator(4, SIZE)
    old = finish(allocator, [1, 2, 3, 4])
    new = finish(allocator, [5, 6, 7, 8])
    assert finish(allocator, [1, 2])[0] == old[0]
    assert allocator.take(1) == [old[1]], "unused since the others"
    assert allocator.take(1) == [new[1]]
    assert allocator.share([1, 2, 3, 4]) == [old[0]]
    assert allocator.share([5, 6, 7, 8]) == [new[0]]
    assert allocator.take(1) is None


def test_equal_pages_are_kept_once() -> None:
    allocator = PageAllocator(4, SIZE)
    first, second = allocator.take(2), allocator.take(2)
    assert first is not None
    assert second is not None
    assert allocator.keep([1, 2, 3, 4], first) == first
    assert allocator.keep([1, 2, 3, 4], second) == first
    assert allocator.free == 2
    allocator.give_back(first)
    assert allocator.free == 2
    allocator.give_back(first)
    assert allocator.free == 4


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_is_kept_unless_wanted(keep: bool) -> None:
    allocator = PageAllocator(3, SIZE, keep_prefixes=keep)
    pages = finish(allocator, [1, 2, 3, 4, 5])
    assert allocator.share([1, 2, 3, 4, 5]) == (pages[:2] if keep else [])
