"""How work is cut when memory runs out, by hand."""

import logging

import pytest
import torch

from hybrid_rl.controller.failures import Site, error_of, failure_of
from hybrid_rl.memory.shortage import Halvings, is_shortage, pass_tokens

LENGTHS = [9, 7, 5, 4, 3, 2, 1, 8]


def size(rows):
    return sum(LENGTHS[row] for row in rows)


def shortage() -> RuntimeError:
    """What PyTorch really raises on the host."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


def together(halvings, compute, micro_batches):
    found = None
    for attempt in halvings.attempts(micro_batches, size):
        with attempt as cut:
            found = compute(cut)
    return found


class Memory:
    """Room for so many tokens in a pass. passes: the samples of all that were tried."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.passes = tokens, []

    def __call__(self, rows):
        self.passes.append([*rows])
        if sum(LENGTHS[row] for row in rows) > self.tokens:
            raise shortage()
        return [*rows]

    def all(self, cut):
        return [(place, self(rows)) for place, rows in cut]


def test_errors_of_memory_are_told_from_others():
    assert is_shortage(shortage()) and is_shortage(MemoryError()) and is_shortage(torch.OutOfMemoryError("CUDA"))
    assert not is_shortage(RuntimeError("shape")) and not is_shortage(ValueError("not enough memory"))


def test_a_pass_that_does_not_fit_is_done_in_halves_and_later_ones_begin_so(caplog):
    memory, halvings = Memory(16), Halvings(is_alone=True)
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        assert halvings.each(memory, [0, 1, 2, 3], size) == [[0, 1], [2, 3]]
    assert memory.passes == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert "in a pass of up to 25 tokens" in caplog.text and "optimizer.tokens_per_micro_batch=12 " in caplog.text
    memory.passes.clear()
    assert halvings.each(memory, [4, 5, 6, 7, 3], size) == [[4, 5, 6], [7, 3]]
    assert halvings.each(memory, [2], size) == [[2]] and halvings.each(memory, [], size) == [[]]
    assert (halvings.number, len(memory.passes)) == (1, 4)


def test_only_what_is_left_is_cut_again():
    memory, halvings = Memory(9), Halvings(is_alone=True)
    assert halvings.each(memory, [6, 5, 4, 3, 2, 0], size) == [[6, 5, 4], [3, 2], [0]]
    assert memory.passes == [[6, 5, 4, 3, 2, 0], [6, 5, 4], [3, 2, 0], [3, 2], [0]]


def test_what_belongs_together_is_done_again_from_its_start():
    memory, halvings = Memory(16), Halvings(is_alone=True)
    found = together(halvings, memory.all, [[0, 1], [2, 3, 7], []])
    assert found == [(0, [0]), (0, [1]), (1, [2, 3]), (1, [7]), (2, [])]
    assert memory.passes == [[0, 1], [2, 3, 7], [0], [1], [2, 3], [7], []]


@pytest.mark.parametrize("method", ["each", "together"])
def test_a_sample_that_does_not_fit_is_an_error_that_says_what_to_do(method):
    memory, halvings = Memory(6), Halvings(is_alone=True)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        halvings.each(memory, [0, 3], size) if method == "each" else together(halvings, memory.all, [[0, 3]])
    assert raised.value.__notes__[0].startswith("not even a single sample of 9 tokens fits")
    assert halvings.number == 1


def test_tries_are_bounded():
    memory, halvings = Memory(-1), Halvings(is_alone=True)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        halvings.each(memory, [6] * 1000, size)
    assert [len(rows) for rows in memory.passes] == [1000, 500, 250, 125, 63, 32, 16, 8, 4, 2, 1]


def test_a_rank_among_others_does_not_halve_by_itself():
    memory, halvings = Memory(8), Halvings(is_alone=False)
    with pytest.raises(RuntimeError) as raised:
        together(halvings, memory.all, [[0, 1]])
    assert raised.value.__notes__ == [
        "optimizer.tokens_per_micro_batch makes passes smaller on all ranks; the largest of this rank had 16 tokens"
    ]
    assert pass_tokens(raised.value) == 16


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_the_driver_reads_the_size_of_the_pass_from_the_error_of_a_rank(kind):
    def fails(rows):
        raise kind("DefaultCPUAllocator: not enough memory")

    with pytest.raises(kind) as raised:
        Halvings(is_alone=False).each(fails, [0, 1], size)
    failures = {1: failure_of(raised.value), 0: failure_of(RuntimeError("gloo: connection closed by peer"))}
    assert pass_tokens(error_of(Site("policy", 2, {}), "update()", failures)) == 16


def test_smaller_micro_batches_of_all_ranks_do_not_help_a_single_sample():
    memory = Memory(8)
    with pytest.raises(RuntimeError) as raised:
        together(Halvings(is_alone=False), memory.all, [[0], [1]])
    assert raised.value.__notes__[0].startswith("not even a single sample of 9 tokens fits")
    assert pass_tokens(raised.value) is None


def test_other_errors_pass():
    def fails(rows):
        raise KeyError("x")

    halvings = Halvings(is_alone=True)
    with pytest.raises(KeyError):
        halvings.each(fails, [0, 1], size)
    assert halvings.number == 0
