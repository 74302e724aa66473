"""A packed row: the place of every token, and that each label is predicted from exactly its own past."""

import os.path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.batch import Jagged
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.row import Layout, PackedRow, place_weights, prompt_groups
from tests.support.engines.attention_contract import visible_keys
from tests.unit.models.families import build

CPU = torch.device("cpu")


def jagged(rows):
    return Jagged.from_rows(rows, torch.int64)


def test_hand_computed_row():
    prompts = jagged([[1, 2], [3], [1, 2], [4, 5], [1, 2]])
    completions = jagged([[10, 11], [12], [13], [14, 15], []])
    row = PackedRow.of(prompts, completions, CPU)
    # The shared prompt; the two single samples; the completions of the shared one.
    assert row.token_ids.tolist() == [1, 2, 3, 12, 4, 5, 14, 15, 10, 11, 13]
    assert row.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2]
    assert row.layout == Layout((2, 2, 4), (2, 1), (0, 0))
    assert row.labels.tolist() == [10, 11, 12, 13, 14, 15]
    assert row.sources.tolist() == [1, 8, 2, 1, 5, 6]


def test_hand_computed_row_of_prompts_that_begin_alike():
    prompts = jagged([[7, 8, 1], [7, 8, 2, 3], [7, 8, 1]])
    completions = jagged([[10, 11], [12], [13]])
    row = PackedRow.of(prompts, completions, CPU)
    # What all prompts begin with; the rest of the shared prompt; that of the single sample; completions of the first.
    assert row.token_ids.tolist() == [7, 8, 1, 2, 3, 12, 10, 11, 13]
    assert row.positions.tolist() == [0, 1, 2, 2, 3, 4, 3, 4, 3]
    assert row.layout == Layout((1, 3), (2, 1), (0, 0), prefix=2)
    assert [places.tolist() for places in row.layout.seen()] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 3, 4, 5],
        [0, 1, 2, 6, 7],
        [0, 1, 2, 8],
    ]
    assert row.labels.tolist() == [10, 11, 12, 13]
    assert row.sources.tolist() == [2, 6, 4, 2]
    assert (row.layout.num_root_tokens, row.layout.num_tokens, row.layout.longest) == (6, 9, 5)
    # The prefix counts for all three samples, the rest of the shared prompt for two.
    weights = [(1.0, 1.0), (4.0, 0.5), (2.0, 0.0)]
    assert place_weights(row, prompts, weights).tolist() == [7, 7, 3, 4, 4, 0.5, 1, 1, 0]


def test_hand_computed_row_of_completions_that_are_alike():
    """Three of one prompt begin alike and two of those are the same; both of the other prompt are the same."""
    prompts = jagged([[1, 2], [3], [1, 2], [1, 2], [3]])
    completions = jagged([[10, 11, 12], [13, 14], [10, 11, 15, 16], [10, 11, 12], [13, 14]])
    row = PackedRow.of(prompts, completions, CPU)
    # The shared prompt and what its completions begin with; the other prompt and its completion; what is left of two.
    assert row.token_ids.tolist() == [1, 2, 10, 11, 3, 13, 14, 12, 15, 16]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 4, 5]
    assert row.layout == Layout((4, 3), (1, 2), (0, 0))
    assert row.labels.tolist() == [10, 11, 12, 13, 14, 10, 11, 15, 16, 10, 11, 12, 13, 14]
    assert row.sources.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 8, 1, 2, 3, 4, 5]
    assert row.distinct is not None
    assert [places.tolist() for places in row.distinct] == [
        [0, 1, 2, 3, 4, 7, 8],
        [0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 2, 3, 4],
    ]
    once = row.at(row.distinct[0])
    assert (once.labels.tolist(), once.sources.tolist()) == ([10, 11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 3, 8])
    assert once.distinct is None
    weights = [(1.0, 2.0), (0.0, 8.0), (1.0, 3.0), (2.0, 4.0), (0.5, 16.0)]
    expected = [4, 4, 9, 9, 0.5, 24, 24, 6, 3, 3]
    assert place_weights(row, prompts, weights).tolist() == expected


def test_a_completion_without_a_prompt_is_refused():
    model = CausalLM(build("qwen2"))
    for completions in ([[5, 6], [5, 7]], [[5, 6], [5, 6]]):
        with pytest.raises(ModelError, match=r"a prompt of 0 tokens; give every prompt at least one"):
            model.row_of(jagged([[], []]), jagged(completions))
    assert model.row_of(jagged([[], [3]]), jagged([[], [5]])).labels.tolist() == [5]


def test_labels_are_looked_up_once_if_that_saves_a_32nd_of_them():
    """The first of eight tokens, and of eighteen, of two completions each."""
    for length, is_saved in ((8, True), (18, False)):
        rows = [[5, first, *range(20, 18 + length)] for first in (6, 7)]
        row = PackedRow.of(jagged([[1], [1]]), jagged(rows), CPU)
        assert row.layout.roots == (2,) and (row.distinct is not None) == is_saved


def test_a_prefix_that_saves_little_is_not_shared():
    """One token of two prompts is less than a 32nd of 39 tokens, two are more; a prompt keeps a token of its own."""
    long = jagged([[1] * 18, [2] * 17])
    assert PackedRow.of(jagged([[7, 1], [7, 2]]), long, CPU).layout.prefix == 0
    assert PackedRow.of(jagged([[7, 7, 1], [7, 7, 2]]), long, CPU).layout.prefix == 2
    assert PackedRow.of(jagged([[7, 7], [7, 7, 2]]), jagged([[1], [2]]), CPU).layout.prefix == 1
    assert PackedRow.of(jagged([[], [7, 2]]), jagged([[1], [2]]), CPU).layout == Layout((1, 3))
    assert PackedRow.of(jagged([[7, 7, 1], [7, 7, 2]]), long, CPU, least_saved=1 / 8).layout.prefix == 0


def test_as_how_many_tokens_each_place_counts():
    """The row above with its filler: a shared prompt counts for both of its samples."""
    prompts = jagged([[1, 2], [3], [1, 2], [4, 5], [1, 2]])
    completions = jagged([[10, 11], [12], [13], [14, 15], []])
    weights = [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.0, 2.0), (9.0, 9.0)]
    counted = place_weights(PackedRow.of(prompts, completions, CPU), prompts, weights)
    assert counted.tolist() == [2, 2, 1, 0.5, 0, 0, 2, 2, 1, 1, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_rl.models.row.SMALLEST_FILLED_ROW", 4)
        patch.setattr("hybrid_rl.models.row.ROW_STEP", 13)
        row = PackedRow.of(prompts, completions, CPU)
        assert place_weights(row, prompts, weights).tolist() == [
            2,
            2,
            1,
            0.5,
            0,
            0,
            2,
            2,
            0,
            0,
            1,
            1,
            0,
        ]
        assert row.layout.roots == (2, 2, 4, 2)
    prompts = jagged([[1, 2], [3]])
    row = PackedRow.of(prompts, jagged([[], []]), CPU)
    assert place_weights(row, prompts, [(1.0, 1.0), (1.0, 1.0)]).tolist() == [1, 1]


COMPLETIONS = st.lists(st.integers(50, 99), max_size=5) | st.lists(st.integers(50, 51), max_size=5)
SAMPLES = st.lists(st.tuples(st.integers(0, 3), COMPLETIONS), min_size=1, max_size=12)


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=4, max_size=4), samples=SAMPLES)
def test_every_label_is_predicted_from_its_own_past(prompts, samples):
    """Whatever is shared, a label's source sees the prompt and the completion before it, in order of position."""
    chosen = [prompts[which] for which, _ in samples]
    completions = [completion for _, completion in samples]
    row = PackedRow.of(jagged(chosen), jagged(completions), CPU)
    visible = visible_keys(row.layout, None)
    expected, found = [], []
    for prompt, completion in zip(chosen, completions, strict=True):
        expected += [(prompt + completion[:place], label) for place, label in enumerate(completion)]
    for source, label in zip(row.sources.tolist(), row.labels.tolist(), strict=True):
        seen = visible[source].nonzero()[:, 0]
        order = row.positions[seen].argsort()
        assert row.positions[seen][order].tolist() == list(range(len(seen)))
        found.append((row.token_ids[seen[order]].tolist(), label))
    assert found == expected
    # Every distinct prompt that is completed is there once with what its completions begin with, then what is left of
    # each that is different, and nothing else (all samples empty: one prompt).
    needed: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for prompt, completion in zip(chosen, completions, strict=True):
        if completion:
            needed.setdefault(tuple(prompt), set()).add(tuple(completion))
    size = len(chosen[0]) if not needed else 0
    for prompt, different in needed.items():
        alike = min(
            len(os.path.commonprefix(list(different))), *(len(rest) - (len(different) > 1) for rest in different)
        )
        size += len(prompt) + sum(map(len, different)) - alike * (len(different) - 1)
    prefix = min(len(os.path.commonprefix(list(needed))), *(len(prompt) - 1 for prompt in needed)) if needed else 0
    saved = prefix * (len(needed) - 1)
    assert row.layout.prefix == (prefix if saved and saved >= size / 32 else 0)
    assert len(row.token_ids) == row.layout.num_tokens == size - (saved if row.layout.prefix else 0)
    weights = [(number + 1.0, 0.25 * number) for number in range(len(chosen))]
    counted = place_weights(row, jagged(chosen), weights)
    taken = [number for number, completion in enumerate(completions) if completion] or [0]
    total = sum(weights[n][0] * len(chosen[n]) + weights[n][1] * len(completions[n]) for n in taken)
    assert len(counted) == row.layout.num_tokens and float(counted.double().sum()) == total
    pairs = list(zip(row.sources.tolist(), row.labels.tolist(), strict=True))
    if row.distinct is None:
        assert len(pairs) - len(set(pairs)) < max(len(pairs) / 32, 1)
    else:
        first, which = (numbers.tolist() for numbers in row.distinct)
        assert [pairs[number] for number in first] == list(dict.fromkeys(pairs))
        assert [pairs[first[number]] for number in which] == pairs


def test_a_batch_without_any_completion_token_still_makes_a_row():
    row = PackedRow.of(jagged([[1, 2], [3]]), jagged([[], []]), CPU)
    assert row.token_ids.tolist() == [1, 2]
    assert row.labels.numel() == row.sources.numel() == 0


def test_prompts_are_compared_token_for_token():
    prompts = jagged([[1, 2], [1, 2, 3], [1, 2], [2, 1], [1, 2, 3]])
    assert prompt_groups(prompts, [4, 2, 0, 1, 3]) == [[4, 1], [2, 0], [3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3,), (1,), (1,)), "parents 0"),
        (((3, 3, 3), (1, 1), (0, 2)), "parents 0"),
        (((3, 3), (1, 1), (1, 0)), "parents 0"),
        (((3,), (1,), ()), "parents 0"),
        (((3,), (1, 1), (0, 1)), "every child a root"),
        (((3, 0),), "at least 1 token"),
        (((3,), (0,), (0,)), "at least 1 token"),
    ],
)
def test_a_layout_that_is_none_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


def test_sizes_of_a_layout():
    layout = Layout((5, 2, 9), (3, 1, 4), (0, 0, 1))
    assert (layout.num_shared, layout.num_root_tokens, layout.num_tokens, layout.longest) == (2, 16, 24, 9)
    assert layout.child_totals() == [4, 4]
    assert Layout((5,), (6,), (0,)).longest == 11


@pytest.mark.parametrize(("num_tokens", "filler"), [(1023, 0), (1024, 0), (1025, 127), (1151, 1), (1152, 0)])
def test_a_large_row_is_filled_up_to_whole_steps(num_tokens, filler):
    prompts = Jagged.from_rows([[7, 8], [7, 8], [9]], torch.int64)
    completions = Jagged.from_rows([[1] * 500, [2] * 400, [3] * (num_tokens - 903)], torch.int64)
    row = PackedRow.of(prompts, completions, torch.device("cpu"))
    assert row.layout.roots == (2, num_tokens - 902, *([filler] if filler else []))
    assert len(row.token_ids) == len(row.positions) == row.layout.num_tokens == num_tokens + filler
    # Every label is predicted from the token before it, whatever is in between in the row.
    assert row.labels.tolist() == completions.values.tolist()
    starts = completions.offsets[:-1]
    assert row.token_ids[row.sources[starts]].tolist() == [8, 8, 9]
    inner = torch.ones(len(row.labels), dtype=torch.bool).index_fill_(0, starts, False)
    assert torch.equal(row.token_ids[row.sources[inner]], row.labels[inner])
    # Filled with a token of the row: that of padding may have an embedding of zeros.
    assert set(row.token_ids.tolist()) == {7, 8, 9, 1, 2, 3}


def test_what_fills_a_row_up_changes_no_logprob(monkeypatch):
    model = CausalLM(build("qwen2", max_position_embeddings=1024))
    generator = torch.Generator().manual_seed(0)
    prompts = Jagged.from_rows([[5, 6, 7]] * 8 + [[8]] * 4, torch.int64)
    lengths = torch.randint(90, 130, (12,), generator=generator).tolist()
    completions = Jagged.from_rows(
        [torch.randint(2, 90, (length,), generator=generator).tolist() for length in lengths], torch.int64
    )
    filled = PackedRow.of(prompts, completions, torch.device("cpu"))
    monkeypatch.setattr("hybrid_rl.models.row.ROW_STEP", 1)
    bare = PackedRow.of(prompts, completions, torch.device("cpu"))
    assert filled.layout.num_tokens > bare.layout.num_tokens >= 1024
    for mine, theirs in zip(model.row_logprobs(filled, 1.0), model.row_logprobs(bare, 1.0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# RMS norms of transformers round to float32 in models of float64, layer norms do not.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("gpt2", torch.float64, 1e-12), ("gpt2", torch.float32, 5e-6), ("qwen2", torch.float32, 5e-6)],
)
def test_a_shared_prefix_changes_neither_hidden_states_nor_gradients(name, dtype, tolerance, monkeypatch):
    """With it four prompts of 24 tokens and 12 completions are 23 + 4 + 60 tokens and not 156."""
    model = CausalLM(build(name).to(dtype))
    prompts = jagged([[*range(3, 26), 30 + number // 3] for number in range(12)])
    completions = jagged([[40 + number, *range(50, 54)] for number in range(12)])
    rows, numbers = [], []
    for least in (2.0, 1 / 32):
        monkeypatch.setattr("hybrid_rl.models.row.LEAST_SAVED", least)
        row = PackedRow.of(prompts, completions, CPU)
        hidden = model.hidden_states(row.token_ids, row.positions, model.attention.context(row.layout, model.device))
        predicting = hidden[row.sources]
        model.module.zero_grad()
        direction = torch.randn(predicting.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        (predicting * direction).sum().backward()
        gradients = [parameter.grad for parameter in model.backbone.parameters() if parameter.grad is not None]
        rows.append(row)
        numbers.append([predicting.detach(), *(gradient.clone() for gradient in gradients)])
    assert [(row.layout.prefix, row.layout.num_tokens) for row in rows] == [(0, 156), (23, 87)]
    for apart, shared in zip(*numbers, strict=True):
        assert float((apart - shared).abs().max()) <= tolerance * float(apart.abs().max())
