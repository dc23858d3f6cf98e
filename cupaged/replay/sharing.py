"""A prefix cache: the pages of prompt blocks that requests have computed, kept for those that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

BLOCK = 512  # tokens that one of Mooncake's hash ids stands for


class Block:
    """A block of a prompt behind the blocks ahead of it: a node of the tree of all cached prefixes.

    Attributes
    ----------
    pages : numpy.ndarray
        int64, the pages that end inside this block. A page that begins in the block before is one of them: its
        content depends on no block behind this one.
    users : int
        Running requests that own these pages too.
    """

    __slots__ = ("children", "name", "pages", "parent", "users")

    def __init__(self, parent: Block | None, name: int, pages: np.ndarray):
        self.parent, self.name, self.pages = parent or self, name, pages
        self.children: dict[int, Block] = {}
        self.users = 0


class PrefixCache:
    """Which pages hold which prefixes; the cache is one owner of each.

    Only whole pages inside whole blocks are cached, so a page is never written after it has come here: a request
    that takes a prefix goes on in a page of its own. Blocks that no running request uses are idle, and given up
    when the pool is short, the least recently used first::

        A: |block 7|block 3|block 9|      7 -- 3 -- 9      A, B and C have ended: all are idle.
        B: |block 7|block 3|block 4|        |    `- 4      D begins as B did, and so becomes
        C: |block 7|block 5|                 `- 5          a user of 7, 3 and 4.

    Parameters
    ----------
    page_size : int
        Slots in a page; any, but sizes that divide `BLOCK` share most.

    Attributes
    ----------
    idle_pages : int
        Pages of idle blocks.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.idle_pages = 0
        self._root = Block(None, -1, np.empty(0, np.int64))
        # A path is always put here deepest block first, and a block's ancestors are used whenever it is: so the
        # first one has no children.
        self._idle: OrderedDict[Block, None] = OrderedDict()

    def find(self, ids: Sequence[int], prompt: int) -> list[Block]:
        """Longest cached prefix of a prompt, which leaves at least one token to compute."""
        path: list[Block] = []
        block = self._root
        for name in ids[: (prompt - 1) // BLOCK] if prompt else ():
            child = block.children.get(name)
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def pages(self, path: Sequence[Block]) -> np.ndarray:
        """Pages of a path, in the order of their tokens."""
        return np.concatenate([block.pages for block in path]) if path else self._root.pages

    def acquire(self, path: Sequence[Block]) -> None:
        """Enter a request that uses a path."""
        for block in path:
            if not block.users:
                del self._idle[block]
                self.idle_pages -= len(block.pages)
            block.users += 1

    def give_up(self, path: Sequence[Block]) -> None:
        """Enter that a request uses a path no more."""
        for block in reversed(path):
            block.users -= 1
            if not block.users:
                self._idle[block] = None
                self.idle_pages += len(block.pages)

    def insert(self, ids: Sequence[int], prompt: int, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep the full blocks of a prompt that are not here yet.

        Parameters
        ----------
        ids : sequence of int
            Ids of its blocks.
        prompt : int
            Its tokens.
        own : numpy.ndarray
            The pages of the request that computed it.

        Returns
        -------
        held, new : numpy.ndarray
            Pages that the cache holds for these blocks now, and those of them that came to it from `own`.
        """
        path: list[Block] = []
        new: list[np.ndarray] = []
        block = self._root
        for i, name in enumerate(ids[: prompt // BLOCK]):
            child = block.children.get(name)
            if child is None:
                first, end = i * BLOCK // self.page_size, (i + 1) * BLOCK // self.page_size
                child = block.children[name] = Block(block, name, own[first:end].copy())
                self.idle_pages += len(child.pages)
                self._idle[child] = None
                new.append(child.pages)
            path.append(child)
            block = child
        for block in reversed(path):
            if not block.users:
                self._idle.move_to_end(block)
        return self.pages(path), np.concatenate(new) if new else self._root.pages

    def evict(self, count: int) -> np.ndarray:
        """Forget idle blocks of at least `count` pages, or all of them; their pages."""
        gone: list[np.ndarray] = []
        while count > 0 and self._idle:
            block, _ = self._idle.popitem(last=False)
            del block.parent.children[block.name]
            gone.append(block.pages)
            count -= len(block.pages)
        pages = np.concatenate(gone) if gone else self._root.pages
        self.idle_pages -= len(pages)
        return pages
