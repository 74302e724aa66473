"""The simulation of the tail, against a schedule on paper."""

from benchmarks.simulate_tail import dealt, ends


def test_a_schedule_on_paper():
    """Two places. In order, prompt 0 has both until 1 and 4; prompt 1 goes on from 1 to 4 and from 4 to 6; prompt 2
    from 4 to 13 and from 6 to 7. Backwards, one place has the 9 tokens; the other 1, 3, 2, 1 and 4, which end at 1, 4,
    6, 7 and 11."""
    lengths = [[1, 4], [3, 2], [9, 1]]
    assert ends(lengths, [0, 1, 2], 2) == {0: 4, 1: 6, 2: 13}
    assert ends(lengths, [2, 1, 0], 2) == {2: 9, 1: 6, 0: 11}


def test_the_order_and_the_dealing_are_those_of_rollouts():
    assert dealt([None] * 5, 2, 2) == [[0, 2, 4], [1, 3]]
    assert dealt([3, 9, 5], 2, 2) == [[1], [2, 0]]
