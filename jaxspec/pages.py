"""Which cache pages are free."""


class PageAllocator:
    """Hands out cache pages by number, and takes them back.

    Pages may be handed on at once: calls run on the device in the order of their dispatch, so whatever an earlier call
    still writes into a page is overwritten before a later one reads it.
    """

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Returns pages taken before."""
        self._free.extend(pages)
