"""Samples, tables and views of a batch: by hand, and through whatever a batch goes through."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch, BatchRef, Jagged, store
from hybrid_rl.batch.samples import MAX_SHOWN
from hybrid_rl.batch.texts import token_texts
from hybrid_rl.errors import DataError
from tests.support.inside.data import reader_of
from tests.support.libraries.python_names import html_of
from tests.support.tiny import build_tokenizer, ids_of

MESSAGES = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}]
NAN = float("nan")


def numbers(rows: list[list[float]]) -> Jagged:
    return Jagged.from_rows(rows, torch.float32)


def columns() -> dict[str, Any]:
    """Three samples of two groups: right, failed, and of an agent whose second token is the environment's."""
    return {
        "prompt": ["1+1=", "1+1=", [{"role": "user", "content": "2+2="}]],
        "completion": ["2", "35", "4a"],
        "completion_ids": Jagged.from_rows([[*ids_of("2"), 1], ids_of("35"), ids_of("4a")], torch.int64),
        "completion_mask": Jagged.from_rows([[1, 1], [1, 1], [1, 0]], torch.bool),
        "rollout_logprobs": numbers([[-1, -2], [-3, -4], [-0.5, 0]]),
        "old_logprobs": numbers([[-1, -2.5], [-3, -4], [-0.5, 0]]),
        "advantages": numbers([[1, 0.5], [0, 0], [-2, 0]]),
        "rewards": torch.tensor([1, NAN, 0.25], dtype=torch.float64),
        "function_rewards": [[1.0, 0.5], [NAN, 0.0], [0.0, 0.25]],
        "completion_length": torch.tensor([2, 2, 2]),
        "group": torch.tensor([5, 5, 9]),
        "finish_reason": ["stop", "length", "turns"],
        "row": [{"answer": "2"}, {"answer": "2"}, {"answer": "4", "group": "easy"}],
        "extra": [{}, {"note": "odd"}, {}],
        "conversation": [{}, {}, {"tokens": [], "messages": MESSAGES, "error": None}],
    }


@pytest.fixture
def batch() -> Batch:
    return Batch(columns()).with_reader(build_tokenizer(), ["exact", "shape"])


@pytest.fixture
def ref(batch: Batch) -> BatchRef:
    """The same samples as a worker would keep them."""
    home: dict[int, Batch] = {}

    def put(block: Batch) -> int:
        home[len(home)] = pickle.loads(pickle.dumps(block))
        return len(home) - 1

    return store(batch, put).with_get(home.__getitem__).with_reader(build_tokenizer(), ["exact", "shape"])


def test_samples_by_hand(batch: Batch) -> None:
    right, failed, agent = batch.samples()
    assert (right.prompt_text, right.completion, right.reward) == ("1+1=", "2", 1.0)
    assert right.rewards == {"exact": 1.0, "shape": 0.5}
    assert (right.advantage, right.group, right.finish_reason, right.row) == (0.75, 5, "stop", {"answer": "2"})
    assert [(t.text, t.logprob, t.trainer_logprob, t.gap) for t in right.tokens] == [
        ("2", -1.0, -1.0, 0.0),
        ("<eos>", -2.0, -2.5, 0.5),
    ]
    assert (failed.reward, failed.rewards, failed.extra) == (None, {"exact": None, "shape": 0.0}, {"note": "odd"})
    assert [(t.text, t.is_policy) for t in agent.tokens] == [("4", True), ("a", False)]
    assert agent.advantage == -2.0  # of the policy's token alone
    assert (agent.prompt_text, agent.shown_text) == ("user: 2+2=", "assistant: add(a=1)")


def test_one_way_to_samples_on_any_number_of_ranks(batch: Batch, ref: BatchRef) -> None:
    assert batch.load() is batch
    assert ref.load()["completion"] == batch.load()["completion"]
    assert [sample.tokens for sample in ref.samples()] == [sample.tokens for sample in batch.samples()]
    assert ref.to_pandas().equals(batch.to_pandas())
    assert ref.show("gap").html() == batch.show("gap").html()
    assert ref.select([2, 0]).samples()[1].tokens == batch.samples()[0].tokens


def test_table_of_pandas(batch: Batch) -> None:
    table = batch.to_pandas()
    assert list(table["completion"]) == ["2", "35", "assistant: add(a=1)"]
    assert table["reward"].isna().tolist() == [False, True, False]
    assert table["rewards/shape"].tolist() == [0.5, 0.0, 0.25]
    assert table["answer"].tolist() == ["2", "2", "4"] and table["group"].tolist() == [5, 5, 9]
    assert table["row/group"][2] == "easy"  # the dataset's column of a name that is taken
    assert table.groupby("group")["advantage"].mean().tolist() == [0.375, -2.0]


def test_reader_follows_the_samples_and_stays_in_its_process(batch: Batch, ref: BatchRef) -> None:
    extra = torch.zeros(3, dtype=torch.int64)
    for made in (batch, ref):
        for one in (made.select([0]), made.with_columns(turn=extra), type(made).concat([made, made])):
            assert one.samples()[0].tokens[0].text == "2"
        there = pickle.loads(pickle.dumps(made))
        assert reader_of(there) is None and reader_of(made) is not None
    assert batch.without("row").samples()[0].rewards == {"exact": 1.0, "shape": 0.5}
    alone = pickle.loads(pickle.dumps(batch)).samples()[0]
    assert (alone.tokens[0].text, alone.tokens[0].id, alone.rewards) == (None, ids_of("2")[0], {"0": 1.0, "1": 0.5})


def test_views_show_what_is_there(batch: Batch) -> None:
    shown = batch.show("gap").html()
    assert 'title="token 1 · id 1 · logprob -2 · trainer_logprob -2.5 · advantage 0.5"' in shown
    assert "&lt;eos&gt;" in shown and "<eos>" not in shown
    assert shown.count("rgba(147,51,234,0.54)") == 1  # 1 + log(0.5) / log(1000) = 0.9 of the strongest, 0.6
    assert "tokens: 1 of the policy, 1 of the environment" in shown and "add(a=1)" in shown
    assert "3 samples in 2 groups" in html_of(batch)
    text = repr(batch.show())
    assert "user: 2+2=" in text and "0.75" in text and text.count("1+1=") == 1  # a prompt once per group


def test_a_terminal_is_safe_from_what_a_model_writes() -> None:
    nasty = Batch({"prompt": ["[bold]p[/bold]"], "completion": ["\x1b[2Jgone\u202e"]})
    text = repr(nasty.show())
    assert "[bold]p[/bold]" in text and "␛[2Jgone\\u202e" in text and "\x1b" not in text


def test_a_color_without_its_column_is_refused(batch: Batch, ref: BatchRef) -> None:
    for made in (batch, ref):
        with pytest.raises(
            DataError, match=r"color='kl' needs the columns \['ref_logprobs'\].*advantage, gap, logprob"
        ):
            made.show("kl")
        with pytest.raises(DataError, match="color='red' is unknown; use one of advantage, gap"):
            made.show("red")
    with pytest.raises(DataError, match="first=0 must be"):
        batch.show(first=0)


def test_views_are_bounded() -> None:
    length, count = 5000, 300
    big = Batch(
        {
            "prompt": ["p" * 100_000] * count,
            "completion": ["x"] * count,
            "completion_ids": Jagged(torch.full((length * count,), 9), torch.arange(count + 1) * length),
            "rollout_logprobs": Jagged(torch.full((length * count,), -1.0), torch.arange(count + 1) * length),
        }
    ).with_reader(build_tokenizer())
    page = html_of(big)
    assert len(page) < 700_000
    assert f"300 samples; the first {MAX_SHOWN} are shown" in page
    assert "4,600 more tokens" in page and "98,800 more characters" in page
    assert len(repr(big.show())) < 50_000


def test_batches_of_few_columns_show_themselves() -> None:
    bare = Batch({"group": torch.tensor([0])})
    assert "<table" in html_of(bare)
    assert bare.samples()[0].tokens == () and len(bare.to_pandas()) == 1
    assert "1 sample in 1 group" in repr(bare)


class Slow:
    """A tokenizer that is not of the library `tokenizers`: decoding is all it can do."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode = tokenizer.decode


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, so that most characters take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, Slow])
def test_token_texts_join_to_the_text(wrap: Any) -> None:
    """Of whole characters, and of the bytes without sense that an untrained policy makes."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("é 漢 x")["input_ids"]
    texts = token_texts(wrap(tokenizer), ids)
    assert texts[:2] == ["", "é"] and texts[3:6] == ["", "", "漢"] and "".join(texts) == "é 漢 x"
    assert token_texts(wrap(tokenizer), ids[:1]) == ["\ufffd"]
    assert token_texts(wrap(tokenizer), []) == []
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        ids = torch.randint(256, (30,), generator=generator).tolist()
        assert "".join(token_texts(wrap(tokenizer), ids)) == tokenizer.decode(ids)
