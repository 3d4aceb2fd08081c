"""Which cache pages are free, and which still hold the beginning of some request's tokens.

Pages of finished requests stay where they are, in a tree of prefixes, until their place is needed: a request that
begins with the same tokens shares them, the target's rows and the drafter's alike. A page enters the tree once all its
rows are written, and nobody writes into it any more.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec.sharding.arithmetic import cdiv


@dataclass(eq=False)
class _Prefix:
    """A page in the tree: its tokens, after those of the pages above it."""

    page: int
    tokens: tuple[int, ...]
    parent: "_Prefix | None"
    holders: int = 0
    children: "dict[tuple[int, ...], _Prefix]" = field(default_factory=dict)


class PageAllocator:
    """Hands out cache pages by number, shares those of equal beginnings, and takes them back.

    Pages may be handed on at once: calls run on the device in the order of their dispatch, so whatever an earlier call
    still writes into a page is overwritten before a later one reads it.

    Args:
      pages: in the cache.
      page_size: tokens in each.
      keep_prefixes: whether pages outlive their requests.
    """

    def __init__(self, pages: int, page_size: int, keep_prefixes: bool = True):
        self.count, self._page_size, self._keep_prefixes = pages, page_size, keep_prefixes
        self._free = list(range(pages - 1, -1, -1))
        self._root = _Prefix(-1, (), None)
        self._kept: dict[int, _Prefix] = {}  # by page
        # Kept pages that nobody holds, the longest unused first. Who holds a page holds those above it, and gives back
        # the deepest first: so the first one here has no children.
        self._idle: collections.OrderedDict[int, _Prefix] = collections.OrderedDict()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._idle)

    def holding(self, tokens: int) -> int:
        """How many pages so many tokens need."""
        return cdiv(tokens, self._page_size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) where fewer are free; the longest unused prefixes give way."""
        if count > self.free:
            return None
        while len(self._free) < count:
            self._forget_one()
        return [self._free.pop() for _ in range(count)]

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of `tokens`; they are the caller's too until it gives them back."""
        node, pages = self._root, []
        for part in self._parts(tokens):
            child = node.children.get(part)
            if child is None:
                break
            self._hold(child)
            pages.append(child.page)
            node = child
        return pages

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Puts a request's pages into the tree.

        Args:
          tokens: those whose rows are written, or will be before any call yet to be dispatched.
          pages: the request's.
        Returns:
          the pages that the request holds now: where another request put equal ones there first, those.
        """
        held = list(pages)
        if not self._keep_prefixes:
            return held
        # Those that are in the tree already come first.
        known = sum(1 for _ in itertools.takewhile(self._kept.__contains__, held))
        node = self._kept[held[known - 1]] if known else self._root
        for place, part in enumerate(self._parts(tokens[known * self._page_size :]), start=known):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = self._kept[held[place]] = _Prefix(held[place], part, node, holders=1)
            elif child.page != held[place]:
                self._hold(child)
                self._free.append(held[place])
                held[place] = child.page
            node = child
        return held

    def give_back(self, pages: Sequence[int]) -> None:
        """Returns a request's pages, in the order of its tokens."""
        for page in reversed(pages):
            node = self._kept.get(page)
            if node is None:
                self._free.append(page)
                continue
            node.holders -= 1
            if not node.holders:
                self._idle[page] = node

    def forget(self) -> int:
        """Frees all kept pages that nobody holds; returns how many."""
        count = len(self._idle)
        while self._idle:
            self._forget_one()
        return count

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size))

    def _hold(self, node: _Prefix) -> None:
        node.holders += 1
        self._idle.pop(node.page, None)

    def _forget_one(self) -> None:
        page, node = self._idle.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.tokens], self._kept[page]
        self._free.append(page)
