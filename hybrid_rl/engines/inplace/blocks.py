"""Which blocks of the cache are free, who shares them, and which hold a prefix that another prompt may use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # the node of the empty prefix

Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """Counts references to blocks and remembers what they hold. Knows no tensors.

    A full block is a node of a tree of prefixes: its key is its parent's node and its own tokens, compared in full, so
    that no hash can take one prompt for another. A block that is filled in part has keys of fewer tokens: what a
    sequence ended with, and may be continued. It keeps them as it fills, for only places after them are written.

    A block that no sequence holds any more stays findable until its memory is needed; the one that was released first
    goes first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # findable blocks without references, oldest first
        self._references = [0] * num_blocks
        self._found: dict[Key, int] = {}  # key -> block
        self._keys: dict[int, list[Key]] = {}  # block -> its keys
        self._nodes: dict[int, int] = {}  # full block -> node
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

    def find(self, tokens: Sequence[int], limit: int) -> tuple[list[int], list[int]]:
        """Blocks that hold the longest known prefix of tokens, at most `limit` blocks, and the nodes from the root to
        the last one. The caller shares them before it takes others."""
        blocks: list[int] = []
        nodes = [ROOT]
        size = self.block_size
        for index in range(limit):
            block = self._found.get((nodes[-1], tuple(tokens[index * size : (index + 1) * size])))
            if block is None:
                break
            blocks.append(block)
            nodes.append(self._nodes[block])
        return blocks, nodes

    def find_tail(self, node: int, tokens: Sequence[int]) -> tuple[int, int]:
        """The block that begins with most of these tokens, fewer than a block's, after the prefix of a node, of those
        that were remembered; and how many these are, 0 if there is none."""
        for count in range(len(tokens), 0, -1):
            block = self._found.get((node, tuple(tokens[:count])))
            if block is not None:
                return block, count
        return -1, 0

    def may_continue(self, block: int, count: int) -> bool:
        """Return whether a findable block may be written after its first `count` tokens: nobody holds it, and nobody
        can find more in it."""
        return block in self._unused and all(len(tokens) <= count for _, tokens in self._keys[block])

    def touch(self, block: int) -> None:
        """Let a findable block that is about to be copied go last, if nobody holds it."""
        if block in self._unused:
            self._unused.move_to_end(block)

    def remember(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """Record that a full block holds these tokens after the prefix of node `parent`; if another block already
        does, keep that one. Return the node of the longer prefix."""
        known = self._found.get((parent, tokens))
        if known is not None:
            return self._nodes[known]
        self._add_key((parent, tokens), block)
        self._nodes[block] = node = self._next_node
        self._next_node += 1
        return node

    def remember_tail(self, parent: int, tokens: tuple[int, ...], block: int) -> None:
        """Record that a block begins with these tokens, fewer than it has places, after the prefix of node `parent`; if
        another block already does, keep that one. They must have been computed before the next pass."""
        if (parent, tokens) not in self._found:
            self._add_key((parent, tokens), block)

    def _add_key(self, key: Key, block: int) -> None:
        self._found[key] = block
        self._keys.setdefault(block, []).append(key)

    def forget(self) -> None:
        """No prefix can be found any more: the weights are about to change, or the cache is lost."""
        self._free.extend(reversed(self._unused))
        self._unused.clear()
        self._found.clear()
        self._keys.clear()
        self._nodes.clear()

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        for key in self._keys.pop(block):
            del self._found[key]
        self._nodes.pop(block, None)
        return block
