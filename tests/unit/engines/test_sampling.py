"""From logits to tokens: the distribution that comes out, the support that truncation leaves, and extreme logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from hybrid_rl.compat.native import keyed_uniform, operator
from hybrid_rl.config import load_config
from hybrid_rl.config.validate import resolve
from hybrid_rl.engines.base import SamplingParams, derive_seed
from hybrid_rl.engines.sampling import SamplingTensors, check_finite, penalise, sample, sample_torch, truncate
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.run.prepare import sampling_params

CPU = torch.device("cpu")
P = [0.4, 0.3, 0.15, 0.1, 0.05]
# 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


@pytest.fixture(params=["compiled", "pytorch"])
def form(request, monkeypatch):
    """Both forms of the operator, one after the other."""
    if request.param == "pytorch":
        monkeypatch.setattr("hybrid_rl.engines.sampling.operator", lambda name: None)
    elif operator("sample") is None:
        pytest.skip("the compiled extension was not built (no C++ compiler when installing, or HYBRID_RL_NATIVE=0)")
    return request.param


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


@pytest.mark.usefixtures("form")
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
    cut = truncate(logprobs, params({"top_k": top_k, "top_p": top_p, "min_p": min_p})).log_softmax(1)[0]
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
        torch.testing.assert_close(truncate(logprobs, params(row)).softmax(1), torch.tensor([[1.0, 0, 0, 0, 0]]))


def test_ties_of_the_best_under_min_p_all_stay():
    cut = truncate(torch.tensor([[0.4, 0.4, 0.2]]).log(), params({"min_p": 1.0}))
    torch.testing.assert_close(cut.softmax(1), torch.tensor([[0.5, 0.5, 0.0]]))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "rows",
    [
        [{}, {"temperature": 0.0, "top_k": 1}, {"top_k": 3}, {"temperature": 0.7, "min_p": 0.1}],
        [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.2}],
    ],
    ids=["truncated", "plain"],
)
def test_rows_do_not_see_the_parameters_of_other_rows(rows):
    """A tail behind a mass that rounds to 1 is where top-p = 1 could cut by accident."""
    logits = torch.cat([torch.tensor([30.0, 20.0]), torch.linspace(3, -3, 62)]).repeat(4, 1)
    rows = [{**row, "seed": seed} for seed, row in enumerate(rows)]
    positions = torch.tensor([3, 1, 4, 1])
    tokens, logprobs = sample(logits, params(*rows), positions)
    for row in range(4):
        own = sample(logits[row : row + 1], params(rows[row]), positions[row : row + 1])
        torch.testing.assert_close((tokens[row : row + 1], logprobs[row : row + 1]), own, rtol=0, atol=0)
    plain = torch.log_softmax(logits, 1)
    assert torch.equal(truncate(plain, params(*rows))[:2], plain[:2])


@pytest.mark.usefixtures("form")
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
        monkeypatch.setattr("hybrid_rl.engines.sampling.keyed_uniform", lambda *_, words=words: torch.tensor([words]))
        tokens, logprobs = sample_torch(logits[None], params({}), torch.zeros(1, dtype=torch.int64))
        assert tokens.item() == expected
        assert logprobs.isfinite().all()


def uniforms(seeds, positions):
    """The number in (0, 1) behind each token, float64."""
    high, low = keyed_uniform(seeds, positions, 2).double().unbind(1)
    return high + (low - 0.5) * 2.0**-23


@pytest.mark.parametrize(
    ("num_rows", "num_columns"),
    [
        (0, 5),
        (1, 1),
        (300, 2),
        (200, 18),
        (90, 63),
        (90, 65),
        (64, 511),
        (64, 512),
        (64, 513),
        (40, 5000),
        (3, 152_000),
    ],
)
@pytest.mark.parametrize("spread", [0.01, 4.0, 40.0])
@pytest.mark.usefixtures("form")
def test_every_token_is_where_its_uniform_number_falls(num_rows, num_columns, spread):
    """Against the cumulative distribution in float64: within 1e-6 of the borders of the token's interval."""
    generator = torch.Generator().manual_seed(num_columns)
    logits = spread * torch.randn(num_rows, num_columns, generator=generator) - 7
    logits[::5, : num_columns // 3] = -math.inf
    rows = [{"temperature": [1.0, 0.7, 2.5, 0.0][i % 4], "seed": derive_seed(i)} for i in range(num_rows)]
    tensors, positions = params(*rows), torch.arange(num_rows) * 977
    tokens, logprobs = sample(logits, tensors, positions)
    exact = (logits.double() / torch.where(tensors.temperature > 0, tensors.temperature, 1.0)[:, None]).log_softmax(1)
    chosen = exact.gather(1, tokens[:, None])[:, 0]
    assert (tokens.dtype, logprobs.dtype, tokens.shape) == (torch.int64, torch.float32, (num_rows,))
    torch.testing.assert_close(logprobs.double(), chosen, rtol=2e-7, atol=1e-6)
    greedy = tensors.temperature == 0
    if num_rows:
        assert torch.equal(tokens[greedy], logits.argmax(1)[greedy])
    upper = exact.exp().cumsum(1).gather(1, tokens[:, None])[:, 0]
    uniform = uniforms(tensors.seed, positions)
    inside = (upper - chosen.exp() - 1e-6 <= uniform) & (uniform <= upper + 1e-6) & chosen.isfinite()
    assert bool((inside | greedy).all())


def test_logprobs_of_a_large_vocabulary_after_truncation():
    """Far from 0 too, where float32 has few digits left for what distinguishes the tokens."""
    logits = 4 * torch.randn(4, 152_000, generator=torch.Generator().manual_seed(3)) + 1000
    rows = [{"top_k": 100_000}, {"top_p": 0.9999}, {"min_p": 1e-7}, {"top_k": 150_000, "temperature": 2.5}]
    tensors = params(*rows)
    tokens, logprobs = sample(logits, tensors, torch.arange(4))
    exact = logits.double() / tensors.temperature[:, None]
    for row, cut in enumerate(truncate(exact.float(), tensors)):
        exact[row, cut == -math.inf] = -math.inf
    chosen = exact.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), chosen, rtol=2e-7, atol=1e-6)


@pytest.mark.usefixtures("form")
def test_the_largest_and_the_smallest_uniform_numbers_find_possible_tokens():
    seeds = torch.arange(300_000)
    uniform = uniforms(seeds, torch.zeros_like(seeds))
    extremes = [int(uniform.argmin()), int(uniform.argmax())]
    logits = torch.full((2, 3000), -math.inf)
    logits[:, 700:2200] = 1.0
    tokens, logprobs = sample(logits, params(*({"seed": seed} for seed in extremes)), torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == [700, 2199]
    torch.testing.assert_close(logprobs, torch.full((2,), -math.log(1500)))


@pytest.mark.usefixtures("form")
def test_both_words_of_the_uniform_number_count():
    """A border between the number and its coarse half, near 1, where float32 can tell them apart."""
    seeds = torch.arange(300_000)
    seeds = seeds[uniforms(seeds, torch.zeros_like(seeds)).argsort(descending=True)[:40]]
    zeros = torch.zeros(40, dtype=torch.int64)
    fine, coarse = uniforms(seeds, zeros), keyed_uniform(seeds, zeros, 2)[:, 0].double()
    rare = 1 - (fine + coarse) / 2
    logits = torch.stack([torch.zeros(40), (rare / (1 - rare)).log().float()], 1)
    tokens, _ = sample(logits, params(*({"seed": seed} for seed in seeds.tolist())), zeros)
    assert tokens.tolist() == (fine > coarse).long().tolist()
    assert 0 < int(tokens.sum()) < 40


@pytest.mark.usefixtures("form")
def test_the_first_of_several_best_tokens_is_the_greedy_one():
    logits = torch.zeros(1, 2000)
    logits[0, [1100, 1101, 1990]] = 2.0
    tokens, logprobs = sample(logits, params({"temperature": 0.0}), torch.zeros(1, dtype=torch.int64))
    assert tokens.item() == 1100
    assert logprobs.item() == pytest.approx(2 - math.log(3 * math.e**2 + 1997), abs=1e-6)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_columns", [5, 3000])
@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}])
def test_rows_without_a_distribution_are_marked_and_counted(num_columns, row):
    logits = torch.zeros(6, num_columns)
    logits[0, -1] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[5, 0] = math.nan
    tokens, logprobs = sample(logits, params(*[row] * 6), torch.zeros(6, dtype=torch.int64))
    assert logprobs.isnan().tolist() == [True, False, True, True, False, True]
    assert bool(((tokens >= 0) & (tokens < num_columns)).all())
    with pytest.raises(ModelError, match="not finite in 4 of 6 rows"):
        check_finite(logprobs.tolist())
    check_finite(logprobs[[1, 4]].tolist())


@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 3}])
def test_nothing_waits_for_the_device(row):
    """A meta tensor has no values: whoever asks for one fails."""
    meta = torch.device("meta")
    logits, positions = torch.empty(4, 9, device=meta), torch.empty(4, dtype=torch.int64, device=meta)
    tokens, logprobs = sample(logits, SamplingTensors.of([SamplingParams(1, **row)] * 4, meta), positions)
    assert (tokens.shape, tokens.dtype, logprobs.dtype) == ((4,), torch.int64, torch.float32)
    penalise(logits, positions.float(), positions[:, None])


def test_repetition_penalty_by_hand():
    logits = torch.tensor([[4.0, -4.0, 1.0, 0.0, -2.0], [4.0, -4.0, 1.0, 0.0, -2.0]])
    history = torch.tensor([[0, 1, 1, 3], [2, -1, -1, -1]])
    penalised = penalise(logits, torch.tensor([2.0, 0.5]), history)
    assert penalised.tolist() == [[2.0, -8.0, 1.0, 0.0, -2.0], [4.0, -4.0, 2.0, 0.0, -2.0]]
    assert logits[0].tolist() == [4.0, -4.0, 1.0, 0.0, -2.0]


def test_repetition_penalty_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator) * 5
    histories = [torch.randint(0, 40, (length,), generator=generator) for length in (1, 7, 60, 13, 2, 200)]
    penalties = [1.3, 0.8, 1.0, 5.0, 1.05, 1.2]
    padded = torch.nn.utils.rnn.pad_sequence(histories, batch_first=True, padding_value=-1)
    penalised = penalise(logits, torch.tensor(penalties), padded)
    for row, (history, penalty) in enumerate(zip(histories, penalties, strict=True)):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history[None], logits[row : row + 1].clone())
        torch.testing.assert_close(penalised[row : row + 1], expected)
    assert torch.equal(penalised[2], logits[2])


def test_training_samples_without_a_penalty_and_evaluation_may_have_one():
    config = load_config({"eval_repetition_penalty": 1.2})[0]
    training, evaluation = sampling_params(config, (1,))
    assert (training.repetition_penalty, evaluation.repetition_penalty) == (1.0, 1.2)
    with pytest.raises(ConfigError, match="set eval_repetition_penalty"):
        load_config({"repetition_penalty": 1.2})
    with pytest.raises(ConfigError, match="eval_repetition_penalty=1.2 would do nothing: there is no eval_dataset"):
        resolve(*load_config({"eval_repetition_penalty": 1.2}), has_eval=False)


def test_seeds_depend_on_every_part_in_order_and_fit_int64():
    seeds = [derive_seed(*parts) for parts in ((0, "a", 1), (0, "a", 2), (1, "a", 0), (0, "b", 1), ("a", 0, 1), ())]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "a", 1) == seeds[0]
