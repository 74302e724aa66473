"""Drafts by hand: contexts, quantiles, chances, and what makes room."""

import pytest

from hybrid_rl.engines.inplace.drafts import Draft, Drafts


def tokens_of(drafts, prompt_ids, token_ids, uniform, *, greedy=False, least_chance=0.0):
    made = drafts.propose(prompt_ids, token_ids, uniform, greedy=greedy, least_chance=least_chance)
    return [draft.token for draft in made]


def test_what_followed_the_same_tokens_comes_next_in_whatever_completion_it_was():
    drafts = Drafts()
    drafts.remember(0, (5, 6), [10, 11, 12, 13])
    drafts.follow(1, (5, 6), [10, 11])
    assert tokens_of(drafts, (5, 6), [10, 11], [0.5] * 2) == [12, 13]
    # Nothing has followed 13: the third of the four tokens that there are.
    assert tokens_of(drafts, (5, 6), [10, 11], [0.5] * 3) == [12, 13, 12]


def test_a_running_sibling_and_the_own_text_are_read_as_they_grow():
    drafts = Drafts()
    drafts.follow(1, (5,), [7, 8, 9])
    drafts.follow(2, (5,), [7])
    assert tokens_of(drafts, (5,), [7], [0.5] * 2) == [8, 9]
    drafts.follow(1, (5,), [7, 8, 9, 4])
    assert tokens_of(drafts, (5,), [7], [0.5] * 3) == [8, 9, 4]
    drafts.follow(3, (1, 2, 3, 1), [])
    assert tokens_of(drafts, (1, 2, 3, 1), [], [0.5] * 2) == [2, 3]


def test_the_noise_names_the_quantile_of_what_followed():
    drafts = Drafts()
    for identity, second in enumerate((30, 10, 20, 20)):
        drafts.remember(identity, (5,), [7, second])
    drafts.follow(9, (5,), [7])
    quantiles = [tokens_of(drafts, (5,), [7], [number]) for number in (0.01, 0.24, 0.26, 0.74, 0.76, 0.99)]
    assert quantiles == [[10], [10], [20], [20], [30], [30]]
    assert tokens_of(drafts, (5,), [7], [0.99], greedy=True) == [20]


def test_chances_are_products_of_shares_of_right_drafts_and_end_what_is_unlikely():
    drafts = Drafts()
    drafts.remember(0, (5,), [7, 8, 9])
    drafts.follow(1, (5,), [7])
    first, second = drafts.propose((5,), [7], [0.5] * 2, greedy=False, least_chance=0.0)
    assert (first.chance, second.chance) == (0.25, 0.0625)  # half of a hit in two tries, of a kind never tried
    for _ in range(2):
        drafts.judge(first, True)
    first, second = drafts.propose((5,), [7], [0.5] * 2, greedy=False, least_chance=0.0)
    assert (first.chance, second.chance) == (2.5 / 4, (2.5 / 4) ** 2)
    assert tokens_of(drafts, (5,), [7], [0.5] * 2, least_chance=0.5) == [8]


def test_the_lookup_that_was_right_more_often_is_asked():
    drafts = Drafts()
    drafts.remember(0, (5,), [1, 2, 3, 7, 8])
    for identity in range(1, 4):
        drafts.remember(identity, (5,), [3, 9])
    drafts.follow(4, (5,), [1, 2, 3])
    assert tokens_of(drafts, (5,), [1, 2, 3], [0.5]) == [7]  # the longest context, of equal chances
    drafts.judge(Draft(7, 0.25, (1, 1)), False)
    assert tokens_of(drafts, (5,), [1, 2, 3], [0.5]) == [9]


def test_what_was_used_least_recently_makes_room():
    drafts = Drafts(max_stored_tokens=10)
    drafts.remember(0, (1,), [2, 3, 4])
    drafts.remember(1, (5,), [6, 7, 8])
    drafts.remember(2, (1,), [2])
    assert drafts.num_stored_tokens == 9
    drafts.remember(3, (9,), [9])  # 11 tokens: the prompt (5,) goes
    assert drafts.num_stored_tokens == 7
    drafts.follow(4, (1,), [2])
    assert tokens_of(drafts, (1,), [2], [0.5] * 2) == [3, 4]


def test_tables_that_made_room_are_read_again_when_they_are_needed():
    drafts = Drafts(max_read_tokens=8)
    for prompt_ids in ((1,), (5,)):
        drafts.remember(0, prompt_ids, [2, 3, 4, prompt_ids[0] + 20])
    for prompt_ids in ((1,), (5,), (1,)):
        drafts.follow(9, prompt_ids, [2])
        assert tokens_of(drafts, prompt_ids, [2, 3, 4], [0.5]) == [prompt_ids[0] + 20]
        drafts.begin_rollout()


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_completion_counts_once_whether_it_was_followed_or_not(begins_anew):
    drafts = Drafts()
    drafts.follow(0, (5,), [7])
    if begins_anew:
        drafts.begin_rollout()
    drafts.remember(0, (5,), [7, 8])
    drafts.remember(1, (5,), [7, 9])
    drafts.follow(2, (5,), [7])
    assert [tokens_of(drafts, (5,), [7], [number]) for number in (0.4, 0.6)] == [[8], [9]]
