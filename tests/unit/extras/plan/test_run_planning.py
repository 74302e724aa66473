"""Plans of runs: of a Trainer, against what it then holds, and of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.extras.plan import run_planning
from hybrid_rl.extras.plan.request import Machine
from hybrid_rl.extras.plan.run_plan import RunPlan
from hybrid_rl.extras.plan.run_planning import PROMPT_TOKENS, plan_words
from hybrid_rl.memory.cycle import ACTOR, CRITIC, KV_CACHE, OPTIMIZER, REFERENCE, TEACHER
from hybrid_rl.planning.remedies import Remedy
from tests.support.tiny import build_model
from tests.unit.models.families import build

POSITIONS = 512
LENGTHS = ("max_prompt_length=32", "max_completion_length=64", "prompts_per_step=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of the tiny model, and nothing else."""
    path = tmp_path_factory.mktemp("tiny")
    build_model(max_position_embeddings=POSITIONS).config.save_pretrained(path)
    return path


def plan_of(folder: Path, *words: str, machine: Machine | None = None) -> RunPlan:
    return plan_words([*words, f"model.path={folder}", *LENGTHS], machine or Machine(1, "1GB", "H100"))


def test_a_trainer_holds_what_its_plan_says(make_trainer) -> None:
    trainer = make_trainer(build_model(), max_steps=1)
    planned = trainer.plan()
    metrics = trainer.fit()
    for name in (ACTOR, OPTIMIZER, KV_CACHE):
        assert planned.memory.resident_bytes(name) == metrics[f"memory/{name}_bytes"], name
    assert planned.fits and planned.time is None and "CPUs" in planned.time_missing
    assert "1 rank on a CPU" in planned.title and "nothing is moved" in planned.handoff.words
    assert {phase.name for phase in planned.cycle if phase.is_taken} == {phase.phase for phase in planned.memory.phases}
    assert repr(trainer.plan()) == repr(planned)


def test_words_give_a_whole_plan_from_a_config_alone(folder: Path) -> None:
    plan = plan_of(folder, "ppo", "beta=0.1")
    assert plan.fits and plan.remedies == ()
    assert {ACTOR, OPTIMIZER, REFERENCE, CRITIC, KV_CACHE} <= set(plan.memory.residents)
    assert plan.time is not None and plan.time.seconds["scoring"] > 0 and plan.time.seconds["rollout"] > 0
    assert plan.memory.budget.device_bytes == 10**9 and plan.memory.budget.ranks_per_host == 1
    assert any("reward models" in note for note in plan.memory.notes)
    assert "^ peak" in plan.text()
    assert plan.workload == "4 prompts x 1 completion a step, up to 32 + 64 tokens"
    assert plan.memory.budget.device == "--gpu-memory 1GB"
    # 256 sequences of 96 tokens at 96 B in bfloat16; more cannot be used.
    assert plan.memory.choices.kv_cache_memory_bytes == 256 * 96 * 96
    assert "room for all 256 sequences" in plan.memory.choices.reasons["kv_cache_memory_bytes"]


def test_models_besides_the_policy_have_their_own_size(folder: Path, tmp_path: Path) -> None:
    large = build_model(max_position_embeddings=POSITIONS, num_hidden_layers=3)
    large.config.save_pretrained(tmp_path)
    plan = plan_of(folder, "distillation", f"teacher_path={tmp_path}")
    assert plan.memory.resident_bytes(TEACHER) == 2 * sum(p.numel() for p in large.parameters())
    small = plan_of(folder, "ppo").memory.resident_bytes(CRITIC)
    assert plan_of(folder, "ppo", f"critic_path={tmp_path}").memory.resident_bytes(CRITIC) > small
    with pytest.raises(ConfigError, match="distillation has no teacher: set advantage.teacher_path"):
        plan_of(folder, "distillation")


@pytest.mark.slow
def test_what_does_not_fit_comes_with_remedies_that_help_and_without_times(folder: Path) -> None:
    words = ("device=cpu", "device_memory=1MB", "engine_args.max_num_batched_tokens=64", "max_num_seqs=4")
    plan = plan_of(folder, *words, machine=Machine())
    assert not plan.fits and plan.time is None and "does not fit" in plan.time_missing
    assert plan.text().splitlines()[3].startswith("does not fit: a rank needs ")
    assert not any("CUDA" in note or "allocator" in note for note in plan.memory.notes)
    assert "in MB of 1,000,000 bytes" in plan.text()  # a tiny model is shown in small units
    remedy = plan.remedies[0].split(" and ")
    assert plan_of(folder, *words, *remedy, machine=Machine()).fits


def test_remedies_are_named_as_options_where_the_machine_is_given_by_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Remedy({"num_ranks": 16}, "needs 1 GB per host"), Remedy({"memory.host_memory": "98GB"}, "if so")]
    monkeypatch.setattr(run_planning, "find_remedies", lambda *_: found)
    words = plan_of(folder, machine=Machine(1, "1MB", "H100", "1GB")).remedies
    assert words == ("num_ranks=16 (--gpus 16; needs 1 GB per host)", "--host-memory 98GB (if so)")
    words = plan_of(folder, "device=cpu", "device_memory=1kB", machine=Machine()).remedies
    assert words == tuple(one.words for one in found)


def test_lengths_that_nobody_gave_are_assumed_and_named(folder: Path) -> None:
    words = [f"model.path={folder}", "max_completion_length=16", "prompts_per_step=2"]
    plan = plan_words(words, Machine(1, "1GB"))
    (note,) = [note for note in plan.memory.notes if "assumed" in note]
    assert PROMPT_TOKENS > POSITIONS and f"prompts of up to {POSITIONS - 16} tokens are assumed" in note
    assert "--gpu" in plan.time_missing


def test_without_the_hub_a_folder_with_a_config_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ModelError("cannot load the config of model 'some/model': there is no connection")

    monkeypatch.setattr(run_planning, "load_settings", fail)
    with pytest.raises(ModelError, match="no connection; for a plan a folder with nothing but its config.json"):
        plan_words(["model.path=some/model", *LENGTHS], Machine(1, "1GB"))


def test_models_that_cannot_be_read_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere' is no folder; give the folder benchmarks/layouts"):
        plan_words([f"model.path={folder}", *LENGTHS], Machine(1, "1GB"), layouts=tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=str(path)):
            plan_of(path)
    with pytest.raises(
        ConfigError, match="max_completion_length=5000 leaves no room for a prompt: the model's positions"
    ):
        plan_words([f"model.path={folder}", "max_completion_length=5000"], Machine(1, "1GB"))


@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_with_adapters_whether_it_fits_or_not(tmp_path: Path) -> None:
    build("qwen3-moe").config.save_pretrained(tmp_path)
    words = ("max_prompt_length=8", "max_completion_length=8", "max_num_seqs=2", "tokens_per_micro_batch=16")

    def plan(memory: str, *more: str) -> RunPlan:
        machine = Machine()
        return plan_words(
            ["grpo", f"model.path={tmp_path}", "device=cpu", *words, f"device_memory={memory}", *more], machine
        )

    assert not plan("400KB").fits  # looks for remedies, adapters among them
    assert plan("600KB", "lora.r=4").fits


@pytest.mark.sweep
def test_a_large_mixture_of_experts_is_planned_with_adapters() -> None:
    """On each of 8 ranks lie 30.5e9 parameters / 8, in two bytes, and in four those of the adapters."""
    folder = Path(__file__).parents[4] / "docs/plans/models/qwen3-30b-a3b"
    machine = Machine(8, "80GB", host_memory="1TB", gpus_per_host=8)
    plan = plan_words(["grpo", f"model.path={folder}", "lora.r=16"], machine)
    assert not plan.fits
    assert plan.remedies[0] == "model.gradient_checkpointing=true"
    adapters, base = 996_507_648, 30_532_122_624
    assert plan.memory.resident_bytes(ACTOR) == (2 * base + 4 * adapters) // 8
