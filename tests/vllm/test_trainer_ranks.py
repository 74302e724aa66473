"""FSDP2 over two real ranks into live vLLM, tensor parallel and as two replicas, through the traced direct write."""

import logging
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_rl import Trainer, replay
from hybrid_rl.errors import HandoffError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.vllm.test_trainer import KEYS, SHAPE

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tensor parallel": {"tensor_parallel_size": 2, "handoff.transport": "auto"},
    "two replicas": {"tensor_parallel_size": 1, "handoff.transport": "distributed"},
}


@pytest.fixture
def short_folder():
    """Temporary files of the ranks; the path of a socket may not be long."""
    with tempfile.TemporaryDirectory(prefix="t", dir=Path(tempfile.gettempdir()).anchor + "tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_steps"),
    [
        ("tensor parallel", 2, 2),
        pytest.param("tensor parallel", 2, 20, marks=pytest.mark.sweep),
        pytest.param("tensor parallel", 4, 2, marks=pytest.mark.sweep),
        pytest.param("two replicas", 2, 20, marks=pytest.mark.sweep),
    ],
)
def test_in_every_step_every_logprob_is_the_trainers(layout, num_ranks, num_steps, tmp_path, short_folder, caplog):
    model = build_model(**SHAPE)  # a tied head
    keys = {**KEYS, **LAYOUTS[layout], "num_ranks": num_ranks, "output_dir": str(tmp_path), "max_steps": num_steps}
    keys["save_rollouts"] = True
    keys["handoff.verify_steps"] = verify_steps = min(num_steps, 5)
    keys["ray.env_vars"] = {"TMPDIR": str(short_folder)}
    with (
        caplog.at_level(logging.WARNING),
        Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer,
    ):
        *_, last = trainer.steps()
        trained = last.batch.load()
        truncated = trainer.generate(["1+2=", "3+4=", "5+6="], num_generations=2, top_k=3)
        lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert len(lines) == num_steps and len(truncated) == 6
    num_bytes = sum(p.nbytes for p in model.parameters())
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["handoff/probe_gap"] < 1e-5
        # The slowest rank's: of two replicas each takes the whole model, of two halves each a half and what both hold.
        share = line["handoff/bytes"] / num_bytes
        assert share == 1.0 if layout == "two replicas" else 0.5 < share < 0.6
        assert line["handoff/minimum_bytes"] == line["handoff/bytes"] and line["handoff/host_bytes"] > 0
        assert "handoff/reloaded_bytes" not in line
    replayed = replay(
        trainer.run_folder, num_steps, build_model(**SHAPE), train_dataset=sums(12), tokenizer=build_tokenizer()
    )
    for name in ("loss", "grad_norm", "entropy"):
        assert replayed.metrics[name] == pytest.approx(last.metrics[name], rel=1e-6 * num_steps, abs=1e-8)
    for name in ("rollout_logprobs", "old_logprobs", "advantages", "policy_version"):
        torch.testing.assert_close(replayed.batch[name].values, trained[name].values, rtol=0, atol=1e-6 * num_steps)
    assert [("timing/verify" in line) for line in lines] == [line["step"] % verify_steps == 0 for line in lines]
    assert not [record for record in caplog.records if "loaded anew" in record.message]
    assert [path.name for path in short_folder.rglob("*") if path.is_socket()] == []  # of ranks that tell each other
    assert list(short_folder.glob("hrl-vllm-*")) == []


def leave_out_one_rank(completion_ids, trainer_state, **_):
    """A reward. From the second step on, handoffs write nothing on rank 1."""
    if trainer_state.global_step == 2 and dist.get_rank() == 1:
        from hybrid_rl.resharding.handoff import base, message

        base.copy_pieces = lambda *_, **__: None
        message.Message.unpack = lambda *_: None
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_one_rank_of_a_tensor_parallel_engine_that_is_left_out_is_found(tmp_path, short_folder):
    """As in the museum, in vLLM itself: half of every sharded tensor is that of the policy before."""
    keys = {**KEYS, **LAYOUTS["tensor parallel"], "num_ranks": 2, "output_dir": str(tmp_path), "max_steps": 4}
    keys |= {"ray.env_vars": {"TMPDIR": str(short_folder)}, "learning_rate": 1e-2}
    model = build_model(**SHAPE)
    with Trainer(model, leave_out_one_rank, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        with pytest.raises(HandoffError, match=r"(?s)rank 1.*policy version 2.*do not hold the trainer's weights"):
            trainer.fit()
        assert trainer.global_step == 1
