"""Which blocks of the cache are free, who shares them, and which hold a prefix that another prompt may use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # the node of the empty prefix


class BlockPool:
    """Counts references to blocks and remembers what full blocks hold. Knows no tensors.

    A full block is a node of a tree of prefixes: its key is its parent's node and its own tokens, compared in full, so
    that no hash can take one prompt for another. A block that no sequence holds any more stays findable until its
    memory is needed; the one that was released first goes first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # findable blocks without references, oldest first
        self._references = [0] * num_blocks
        self._found: dict[tuple[int, tuple[int, ...]], int] = {}  # key -> block
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key
        self._nodes: dict[int, int] = {}  # block -> node
        self._next_node = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, findable ones included."""
        return len(self._free) + len(self._unused)

    def take(self, count: int) -> list[int]:
        """`count` fresh blocks, each with one reference. Raises ValueError if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._references[block] += 1
            self._unused.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. The last blocks of a prefix are let go first: without its start a prefix is
        of no use."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._keys:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def find(self, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Blocks that hold the longest known prefix of tokens, at most `limit` blocks, and the node of the last one.
        The caller shares them before it takes others."""
        blocks: list[int] = []
        node = ROOT
        size = self.block_size
        for index in range(limit):
            block = self._found.get((node, tuple(tokens[index * size : (index + 1) * size])))
            if block is None:
                break
            blocks.append(block)
            node = self._nodes[block]
        return blocks, node

    def remember(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """Record that a full block holds these tokens after the prefix of node `parent`; if another block already
        does, keep that one. Return the node of the longer prefix."""
        key = (parent, tokens)
        known = self._found.get(key)
        if known is not None:
            return self._nodes[known]
        node = self._next_node
        self._next_node += 1
        self._found[key], self._keys[block], self._nodes[block] = block, key, node
        return node

    def forget(self) -> None:
        """No prefix can be found any more: the weights are about to change, or the cache is lost."""
        self._free.extend(reversed(self._unused))
        self._unused.clear()
        self._found.clear()
        self._keys.clear()
        self._nodes.clear()

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._found[self._keys.pop(block)]
        del self._nodes[block]
        return block
