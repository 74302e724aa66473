"""Boxes of global tensors."""

import pytest
import torch

from hybrid_rl.weights.boxes import is_first_copy, local_box, local_tensor, num_elements, overlap, within


def box(*parts: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in parts)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (box((0, 4), (2, 6)), box((1, 9), (0, 3)), box((1, 4), (2, 3))),
        (box((0, 4)), box((4, 8)), None),
        (box((0, 4), (0, 1)), box((0, 4), (1, 1)), None),
        (box(), box(), box()),
    ],
)
def test_the_common_part_of_two_boxes(a, b, expected):
    assert overlap(a, b) == overlap(b, a) == expected


def test_a_box_inside_another():
    inner, outer = box((3, 5), (7, 8)), box((2, 6), (7, 9))
    assert within(inner, outer) == box((1, 3), (0, 1))
    whole = torch.arange(100).reshape(10, 10)
    assert torch.equal(whole[outer][within(inner, outer)], whole[inner])


def test_a_plain_tensor_is_its_own_part_and_rank_zero_answers_for_it():
    tensor = torch.nn.Parameter(torch.ones(3, 2))
    assert local_box(tensor) == box((0, 3), (0, 2)) and num_elements(local_box(tensor)) == 6
    assert local_tensor(tensor).data_ptr() == tensor.data_ptr() and not local_tensor(tensor).requires_grad
    assert is_first_copy(tensor, 0) and not is_first_copy(tensor, 1)
    assert local_box(torch.ones(())) == () and num_elements(()) == 1
