"""Training on a device "cuda" that has no numbers: nothing mixes devices, and the host hardly ever waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.batch import Jagged
from hybrid_rl.config import ValueHeadConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.attention.backends import Backend
from hybrid_rl.models.attention.varlen import TorchKernel
from hybrid_rl.models.heads.distribution import token_distribution
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import token_logprobs
from hybrid_rl.models.packed.classifier import sequence_scores
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.critic import Critic
from hybrid_rl.training.learned import LearnedNumbers
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.scoring import batch_logprobs
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch, SideModels
from tests.reference.grpo_case import build_model
from tests.support.cuda.pretended_cuda import CUDA, PretendedCuda, backward, pretended_cuda, to_cuda
from tests.support.inside.training import skip_first_look
from tests.unit.training.critic_case import config_of, critic_batch, policy_with_head
from tests.unit.training.grpo_step import case_config
from tests.unit.training.objective_steps import STEPS, VERSION, prepared_batch, step_batch, step_config

HERE = RankContext(device=CUDA)
ROWS = [0, 1, 5]  # two samples that share a prompt, and one of another


class Bigrams:
    """A language model that looks at one token, so that all that a test runs is the loss."""

    def __init__(self) -> None:
        vocab_size = int(build_model(torch.float32).config.vocab_size)
        self.weight = nn.Parameter(torch.zeros(vocab_size, vocab_size).to(CUDA))
        self.device = self.weight.device

    def row_of(self, prompts: Jagged, completions: Jagged, experts: Jagged | None = None) -> PackedRow:
        return PackedRow.of(prompts, completions, self.device)

    def row_logprobs(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(self._hidden(row), self.weight, None, row.labels, temperature, HeadOptions())

    def row_distribution(self, row: PackedRow, temperature: float) -> Tensor:
        return token_distribution(self._hidden(row), self.weight, None, temperature, HeadOptions())

    def _hidden(self, row: PackedRow) -> Tensor:
        return self.weight[row.token_ids][row.sources]


@pytest.fixture
def cuda() -> Iterator[PretendedCuda]:
    with pretended_cuda() as mode:
        yield mode


def moved(dtype: torch.dtype = torch.float32) -> CausalLM:
    """The recorded model on the pretended device."""
    module = build_model(dtype)
    to_cuda(module)
    return CausalLM(module, "sdpa")


@pytest.mark.parametrize("name", STEPS)
def test_a_micro_batch_mixes_no_devices_and_waits_for_none(name: str) -> None:
    config = step_config(name)
    batch = micro_batch(prepared_batch(step_batch(config), config, [list(range(16))], HERE), ROWS)
    with pretended_cuda() as cuda:
        model: Any = Bigrams()
        reference: Any = Bigrams()
        numbers = LearnedNumbers(config.policy_loss, CUDA)
        spec = LossSpec.of(config)
        mini = MiniBatch(Counts(20, 3, 20), VERSION, spec.beta, spec.algorithm.entropy_coef, numbers.on_device)
        cuda.forget()
        loss, sums, _ = micro_batch_loss(model, batch, spec, mini, SideModels(reference))
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.device == sums.unread().device == model.weight.grad.device == CUDA
        if numbers.on_device is not None:
            assert numbers.on_device.grad is not None and numbers.on_device.grad.device == CUDA
    assert not cuda.reads and not cuda.pageable
    assert sum(cuda.uploads.values()) == 2  # the row, and the columns of the batch


@pytest.mark.parametrize(("name", "dtype"), [("kl in the loss", "float32"), ("lambda_grpo", "bfloat16")])
def test_an_update_reads_the_device_once_per_optimizer_step_and_once_at_its_end(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("hybrid_rl.models.heads.logprobs.runs_in_triton", lambda *_: False)
    old = "recompute" if name == "lambda_grpo" else "detach"
    config = case_config(**{"old_logprobs": old, **STEPS[name]})
    batch = step_batch(config).select(torch.tensor([0, 1, 4, 5]))  # of two prompts
    batch = batch if old == "recompute" else batch.without("old_logprobs")
    plan = [[[0], [1]], [[2, 3]]]
    with pretended_cuda() as cuda:
        actor = Actor(moved(getattr(torch, dtype)), config, HERE, num_optimizer_steps=4)
        cuda.forget()
        metrics = actor.update(batch, plan, VERSION).result()
        assert actor.optimizer.tensors()[0].device == CUDA
    assert {"loss", "grad_norm", "entropy", "ratio/max"} < metrics.keys()
    # Two optimizer steps; what is learned beside the model brings its gradient to the host in each.
    assert sum(cuda.reads.values()) == (5 if name == "lambda_grpo" else 3), cuda.reads
    assert sum(cuda.uploads.values()) <= 3 * 4 + (2 if name == "lambda_grpo" else 0), cuda.uploads
    assert all("on_device" in line for line in cuda.pageable), cuda.pageable


def test_the_critic_reads_once_per_optimizer_step_and_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(num_iterations=1, attention="sdpa")
    batch = critic_batch().select(torch.tensor(ROWS))
    with pretended_cuda() as cuda:
        module = policy_with_head(torch.float32)
        to_cuda(module)
        model = CausalLM(module, "sdpa")
        monkeypatch.setattr("hybrid_rl.training.critic.build_critic", lambda *_: model)
        monkeypatch.setattr(model, "verify", lambda: 0.0)
        critic = Critic(module, config, HERE, num_optimizer_steps=4, options=ValueHeadConfig())
        skip_first_look(critic)  # the head was looked at: once in a run
        cuda.forget()
        metrics = critic.update(batch, [[[0], [1]], [[2]]]).result()
        values = critic.values(batch, [[[0], [1], [2]]])
    assert {"critic/value_loss", "critic/clip_ratio"} < metrics.keys()
    assert sum(cuda.reads.values()) == 3 + 1, cuda.reads
    assert values.values.device.type == "cpu" and not cuda.pageable


def test_scoring_waits_once_for_all_micro_batches(cuda: PretendedCuda) -> None:
    model, batch = moved(), step_batch(case_config()).select(torch.tensor(ROWS))
    cuda.forget()
    logprobs = batch_logprobs(model, batch, [[0], [1], [2]])
    assert logprobs.values.device.type == "cpu" and torch.equal(logprobs.values, torch.ones_like(logprobs.values))
    assert sum(cuda.reads.values()) == 1 and not cuda.pageable


def test_scores_of_a_reward_model_stay_on_its_device(cuda: PretendedCuda) -> None:
    module = policy_with_head(torch.float32)
    to_cuda(module)
    model = CausalLM(module, "sdpa")
    cuda.forget()
    scores = sequence_scores(model, [((1, 2, 3), (4,)), ((1, 2, 3), (5, 6)), ((7,), (8, 9))])
    assert scores.shape == (3,) and scores.device == CUDA
    assert not cuda.reads and not cuda.pageable


def test_varlen_attention_sends_its_runs_in_one_copy(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("hybrid_rl.models.heads.logprobs.runs_in_triton", lambda *_: False)
    model = moved(torch.bfloat16)
    model.attention = Backend("varlen", TorchKernel())
    batch = step_batch(case_config()).select(torch.tensor(ROWS))
    row = PackedRow.of(batch["prompt_ids"], batch["completion_ids"], model.device)
    assert row.layout.children
    cuda.forget()
    model.row_logprobs(row, 1.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert sum(cuda.uploads.values()) == 1 and not cuda.reads and not cuda.pageable


def test_what_would_wait_or_fail_on_a_gpu_is_noticed(cuda: PretendedCuda) -> None:
    there = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match="device"):
        there + torch.zeros(4)
    assert not cuda.reads
    for number, wait in enumerate(
        (
            lambda: float(there.sum()),
            lambda: there[there > 0],
            lambda: there.nonzero(),
            lambda: there.cpu(),
            lambda: torch.equal(there, there),
            lambda: torch.zeros(4).copy_(there, non_blocking=True),
        )
    ):
        wait()
        assert sum(cuda.reads.values()) == number + 1
    torch.ones(4).to("cuda", non_blocking=True)
    assert sum(cuda.uploads.values()) == sum(cuda.pageable.values()) == 1


def test_its_backward_pass_is_that_of_pytorch() -> None:
    def loss_of(weight: Tensor, shift: Tensor) -> Tensor:
        hidden = (torch.arange(6.0).view(3, 2) @ weight + shift).tanh()
        logprobs, entropy = token_logprobs(hidden, weight.t(), None, torch.tensor([0, 1, 1]), 1.0, HeadOptions())
        return (logprobs * torch.tensor([1.0, 2.0, 3.0])).sum() + (entropy * hidden[:, 0]).mean()

    parameters = [torch.tensor([[0.3, -0.2], [0.1, 0.5]]), torch.tensor([0.2, -0.1])]
    grads = []
    for run in (Tensor.backward, backward):
        leaves = [parameter.clone().requires_grad_() for parameter in parameters]
        run(loss_of(*leaves))
        grads.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_folder_with_the_librarys_name_is_not_the_library(cuda: PretendedCuda) -> None:
    """A clone is called so, and what stands in it is counted as what it is."""
    code = compile("there.cpu()", "/srv/hybrid_rl/train.py", "exec")
    exec(code, {"there": torch.zeros(4, device="cuda")})
    assert cuda.reads == {"outside of the library": 1}
