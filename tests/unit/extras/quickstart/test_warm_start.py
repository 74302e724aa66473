from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.extras.quickstart import warm_start as module
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer
from hybrid_rl.extras.quickstart.task import Row, Task, build_task
from hybrid_rl.extras.quickstart.warm_start import (
    SupervisedTrainer,
    continue_supervised,
    encode,
    greedy_accuracy,
    warm_start,
)
from tests.support.inside.data import batches_of

TOKENIZER = build_tokenizer()
# Prompts and answers of unequal lengths.
ROWS = [
    {"prompt": "1+2=", "answer": "3"},
    {"prompt": "12+34=", "answer": "46"},
    {"prompt": "99+99=", "answer": "198"},
    {"prompt": "5-27=", "answer": "-22"},
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def small_task() -> Task:
    return build_task(0, num_train=200, num_heldout=20)


def make_trainer(rows: list[dict[str, str]] = ROWS, seed: int = 0, batch_size: int = 4) -> SupervisedTrainer:
    return SupervisedTrainer(build_model(TOKENIZER, 0), encode(TOKENIZER, rows), seed, 1e-3, batch_size)


def test_encode_by_hand() -> None:
    input_ids, labels = encode(TOKENIZER, ROWS[:2])
    assert input_ids.tolist() == [[3, 12, 4, 14, 5, 1, 0, 0, 0], [3, 4, 12, 5, 6, 14, 6, 8, 1]]
    assert labels.tolist() == [[-100] * 4 + [5, 1] + [-100] * 3, [-100] * 6 + [6, 8, 1]]


def test_loss_is_the_mean_over_answer_tokens_and_eos() -> None:
    model = build_model(TOKENIZER, 0)
    total, num_tokens = 0.0, 0
    for row in ROWS:  # one at a time, without padding
        prompt, target = TOKENIZER(row["prompt"])["input_ids"], [*TOKENIZER(row["answer"])["input_ids"], 1]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([prompt + target])).logits[0].log_softmax(-1)
        total -= sum(logprobs[len(prompt) - 1 + offset, token].item() for offset, token in enumerate(target))
        num_tokens += len(target)
    assert num_tokens == 2 + 3 + 4 + 4
    assert make_trainer().step() == pytest.approx(total / num_tokens, abs=1e-5)


def test_every_row_comes_once_in_a_pass() -> None:
    trainer = make_trainer(batch_size=2)
    batches = batches_of(trainer)
    passes = [next(batches).tolist() + next(batches).tolist() for _ in range(5)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in passes)
    assert len({tuple(order) for order in passes}) > 1


def test_a_seed_gives_one_course_of_training() -> None:
    first, again, other = (make_trainer(ROWS, seed, batch_size=2) for seed in (1, 1, 2))
    losses = [[trainer.step() for _ in range(4)] for trainer in (first, again, other)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_schedule_of_zero_leaves_the_weights() -> None:
    model = build_model(TOKENIZER, 0)
    before = model.lm_head.weight.clone()
    trainer = SupervisedTrainer(model, encode(TOKENIZER, ROWS), 0, 1e-3, 4, schedule=lambda step: float(step == 1))
    trainer.step()
    assert torch.equal(model.lm_head.weight, before)
    trainer.step()
    assert not torch.equal(model.lm_head.weight, before)


def test_greedy_accuracy_of_memorised_rows() -> None:
    trainer = make_trainer()
    while trainer.step() >= 0.02:
        pass
    trainer.model.train()
    assert greedy_accuracy(trainer.model, TOKENIZER, ROWS, max_new_tokens=6) == 1.0
    assert trainer.model.training
    wrong = [{**ROWS[0], "answer": "4"}, *ROWS[1:]]
    assert greedy_accuracy(trainer.model, TOKENIZER, wrong, max_new_tokens=6) == 0.75
    prefix = [ROWS[0], {**ROWS[1], "answer": "4"}, *ROWS[2:]]  # runs on after "4": not exact
    assert greedy_accuracy(trainer.model, TOKENIZER, prefix, max_new_tokens=6) == 0.75
    # Three tokens leave no room for the <eos> of "198" and "-22".
    assert greedy_accuracy(trainer.model, TOKENIZER, ROWS, max_new_tokens=3) == 0.5


def test_a_batch_larger_than_the_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match="batch_size=5"):
        make_trainer(batch_size=5)


def script_accuracies(monkeypatch: pytest.MonkeyPatch, accuracies: list[float]) -> None:
    remaining = iter(accuracies)
    monkeypatch.setattr(module, "greedy_accuracy", lambda *arguments: next(remaining))
    monkeypatch.setattr(module, "STEPS_PER_EVALUATION", 2)
    monkeypatch.setattr(module, "WARM_START_STEPS", 2 * len(accuracies))
    monkeypatch.setattr(module, "BATCH_SIZE", 4)


def test_warm_start_keeps_the_last_weights_inside_the_band(monkeypatch: pytest.MonkeyPatch, small_task: Task) -> None:
    script_accuracies(monkeypatch, [0.1, 0.35, 0.45, 0.6])
    model, seen = build_model(TOKENIZER, 0), {}

    def on_progress(step: int, loss: float) -> None:
        seen[step] = model.lm_head.weight.detach().clone()

    report = warm_start(model, TOKENIZER, small_task, seed=0, on_progress=on_progress)
    assert (report.accuracy, report.steps) == (0.45, 6)
    assert list(seen) == [2, 4, 6, 8]
    assert torch.equal(model.lm_head.weight, seen[6])
    assert not torch.equal(model.lm_head.weight, seen[8])


def test_warm_start_outside_the_band_is_an_error(monkeypatch: pytest.MonkeyPatch, small_task: Task) -> None:
    script_accuracies(monkeypatch, [0.1, 0.2])
    with pytest.raises(ModelError, match=r"accuracy 0\.200 and was never between 0\.3 and 0\.5"):
        warm_start(build_model(TOKENIZER, 0), TOKENIZER, small_task, seed=0)


@pytest.mark.parametrize(("from_answers", "num_answers"), [(False, 5), (True, 1)])
def test_continue_supervised_chooses_its_rows(
    monkeypatch: pytest.MonkeyPatch, small_task: Task, from_answers: bool, num_answers: int
) -> None:
    monkeypatch.setattr(module, "BATCH_SIZE", 4)
    sizes: list[int] = []
    original = module.encode

    def counting_encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        sizes.append(len(rows))
        return original(tokenizer, rows)

    monkeypatch.setattr(module, "encode", counting_encode)
    model = build_model(TOKENIZER, 0)
    before = model.lm_head.weight.clone()
    report = continue_supervised(model, TOKENIZER, small_task, seconds=1e-9, from_answers=from_answers)
    assert sizes == [200 * num_answers]
    assert report.steps == 1 and report.accuracy == 0.0
    assert not torch.equal(model.lm_head.weight, before)
