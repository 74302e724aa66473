"""From logits to tokens: the distribution that comes out, the support that truncation leaves, and extreme logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.rollout import SamplingParams, derive_seed
from hybrid_rl.rollout.sampling import SamplingTensors, sample, truncate

CPU = torch.device("cpu")
P = [0.4, 0.3, 0.15, 0.1, 0.05]
# 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


def params(*rows):
    return SamplingTensors.of([SamplingParams(1, **row) for row in rows], CPU)


def draw(logits, count, positions=None, **row):
    """`count` tokens of the same logits, at other seeds, or at other positions of one seed."""
    rows = [{**row, "seed": 7 if positions is not None else derive_seed(seed)} for seed in range(count)]
    places = torch.zeros(count, dtype=torch.int64) if positions is None else positions
    return sample(logits.expand(count, -1), params(*rows), places)


def support(p, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens stay, written out; one distribution in exact order of its probabilities."""
    kept, mass = set(), 0.0
    for rank, token in enumerate(sorted(range(len(p)), key=lambda t: -p[t])):
        allowed = (not top_k or rank < top_k) and mass < top_p and p[token] >= min_p * max(p)
        if rank == 0 or allowed:
            kept.add(token)
        mass += p[token]
    return kept


@pytest.mark.parametrize("keyed_by", ["seed", "position"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, [p * p / sum(q * q for q in P) for p in P]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.8}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"min_p": 0.2}, [0.4 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.1 / 0.95, 0]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_tokens_follow_the_distribution_and_report_its_logprobs(row, expected, keyed_by):
    count = 20_000
    positions = torch.arange(count) if keyed_by == "position" else None
    tokens, logprobs = draw(torch.tensor(P).log() + 3, count, positions, **row)
    expected = torch.tensor(expected, dtype=torch.float64)
    counts = torch.bincount(tokens, minlength=5).double()
    possible = expected > 0
    assert not counts[~possible].any()
    wanted = count * expected[possible]
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    assert statistic < CHI_SQUARE[int(possible.sum()) - 1]
    torch.testing.assert_close(logprobs.double(), expected[tokens].log(), rtol=1e-5, atol=1e-6)


def test_neighbouring_positions_are_independent():
    tokens, _ = draw(torch.zeros(2), 20_000, torch.arange(20_000))
    pairs = torch.bincount(2 * tokens[:-1] + tokens[1:], minlength=4).double()
    wanted = 19_999 / 4
    assert float(((pairs - wanted) ** 2 / wanted).sum()) < CHI_SQUARE[3]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 10_000), min_size=2, max_size=12, unique=True),
    st.integers(0, 13),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_truncation_keeps_what_its_definition_keeps(weights, top_k, top_p, min_p):
    p = [weight / sum(weights) for weight in weights]
    logprobs = torch.tensor(p, dtype=torch.float64).log().float()[None]
    cut = truncate(logprobs, params({"top_k": top_k, "top_p": top_p, "min_p": min_p}))[0]
    kept = support(p, top_k, top_p, min_p)
    # A threshold met to the last bit of fp32 may fall to either side.
    if kept == support(p, top_k, top_p - 1e-5, min_p + 1e-5) == support(p, top_k, top_p + 1e-5, min_p - 1e-5):
        assert {i for i in range(len(p)) if cut[i] > -math.inf} == kept
    left = sum(p[i] for i in range(len(p)) if cut[i] > -math.inf)
    for token in kept:
        if cut[token] > -math.inf:
            assert cut[token].item() == pytest.approx(math.log(p[token] / left), abs=1e-5)


def test_the_best_token_survives_every_truncation():
    logprobs = torch.tensor([P]).log()
    for row in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.1, "min_p": 1.0}):
        torch.testing.assert_close(truncate(logprobs, params(row)).exp(), torch.tensor([[1.0, 0, 0, 0, 0]]))


def test_ties_of_the_best_under_min_p_all_stay():
    cut = truncate(torch.tensor([[0.4, 0.4, 0.2]]).log(), params({"min_p": 1.0}))
    torch.testing.assert_close(cut.exp(), torch.tensor([[0.5, 0.5, 0.0]]))


def test_rows_do_not_see_the_parameters_of_other_rows():
    """A tail behind a mass that rounds to 1 is where top-p = 1 could cut by accident."""
    logits = torch.cat([torch.tensor([30.0, 20.0]), torch.linspace(3, -3, 62)]).repeat(4, 1)
    rows = [{}, {"temperature": 0.0, "top_k": 1}, {"top_k": 3}, {"temperature": 0.7, "min_p": 0.1}]
    rows = [{**row, "seed": seed} for seed, row in enumerate(rows)]
    positions = torch.tensor([3, 1, 4, 1])
    tokens, logprobs = sample(logits, params(*rows), positions)
    for row in range(4):
        own = sample(logits[row : row + 1], params(rows[row]), positions[row : row + 1])
        torch.testing.assert_close((tokens[row : row + 1], logprobs[row : row + 1]), own, rtol=0, atol=0)
    plain = torch.log_softmax(logits, 1)
    assert torch.equal(truncate(plain, params(*rows))[:2], plain[:2])


def test_greedy_rows_among_sampled_ones():
    logits = torch.tensor(P).log().expand(300, -1)
    rows = [{"temperature": 0.0 if i % 2 else 1.0, "seed": i} for i in range(300)]
    tokens, logprobs = sample(logits, params(*rows), torch.zeros(300, dtype=torch.int64))
    assert not tokens[1::2].any()
    assert tokens[::2].unique().numel() == 5
    torch.testing.assert_close(logprobs, torch.tensor(P).log()[tokens])


@pytest.mark.parametrize(
    ("logits", "possible"),
    [
        ([-math.inf, 0.0, -math.inf], {1}),
        ([-math.inf, -math.inf, 5.0, 5.0, -math.inf], {2, 3}),
        ([3e37, -3e37, 0.0], {0}),
        ([-3e37, -3e37], {0, 1}),
        ([1e4, 1e4, -1e4], {0, 1}),
        ([0.0], {0}),
    ],
)
@pytest.mark.parametrize("row", [{}, {"temperature": 0.1}, {"top_p": 0.999}, {"top_k": 2, "min_p": 1e-3}])
def test_extreme_logits(logits, possible, row):
    tokens, logprobs = draw(torch.tensor(logits), 200, **row)
    assert set(tokens.tolist()) == possible
    torch.testing.assert_close(logprobs, torch.full((200,), -math.log(len(possible))))


def test_a_rare_token_can_be_drawn_and_no_draw_falls_behind_the_last_token(monkeypatch):
    logits = torch.tensor([0.0, -17.0, -math.inf])
    for words, expected in (([1.0 - 2.0**-24] * 2, 1), ([2.0**-24] * 2, 0), ([1.0 - 2.0**-24, 2.0**-24], 0)):
        monkeypatch.setattr("hybrid_rl.rollout.sampling.keyed_uniform", lambda *_, words=words: torch.tensor([words]))
        tokens, logprobs = sample(logits[None], params({}), torch.zeros(1, dtype=torch.int64))
        assert tokens.item() == expected
        assert logprobs.isfinite().all()


def test_select_takes_rows():
    rows = params({"seed": 1, "top_k": 3}, {"seed": 2, "temperature": 0.5}, {"seed": 3, "min_p": 0.25})
    chosen = rows.select(torch.tensor([2, 0]))
    assert (chosen.seed.tolist(), chosen.top_k.tolist(), chosen.min_p.tolist()) == ([3, 1], [0, 3], [0.25, 0.0])
    assert (chosen.temperature.tolist(), chosen.top_p.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_seeds_depend_on_every_part_in_order_and_fit_int64():
    seeds = [derive_seed(*parts) for parts in ((0, "a", 1), (0, "a", 2), (1, "a", 0), (0, "b", 1), ("a", 0, 1), ())]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "a", 1) == seeds[0]
