"""A plan made by hand, with round numbers."""

from __future__ import annotations

from hybrid_rl.extras.plan.handoff_plan import HandoffPlan
from hybrid_rl.extras.plan.run_plan import RunPlan
from hybrid_rl.extras.plan.step_time import StepTime
from hybrid_rl.extras.plan.traffic import Traffic
from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER, Cycle
from hybrid_rl.planning.ledger import ACTIVATIONS, ARENA, Budget, Choices, MemoryPlan, PhaseMemory, Share

GB = 10**9
CYCLE = Cycle.of(
    residents=frozenset({ACTOR, OPTIMIZER, ENGINE_WEIGHTS, KV_CACHE}),
    engine_is_actor=False,
    update_reads_reference=False,
    moves_reference=False,
)


def share(name: str, gigabytes: float, formula: str = "") -> Share:
    """Bytes in gigabytes."""
    return Share(name, int(gigabytes * GB), formula)


def memory(device_gigabytes: float | None = 40.0, host_gigabytes: float | None = 100.0) -> MemoryPlan:
    """A plan of 4 ranks whose optimizer sleeps and whose actor stays."""
    actor, optimizer = share(ACTOR, 4, "1,000,000,000 parameters x 4 B"), share(OPTIMIZER, 8, "2 moments x 4 B")
    asleep = (share(ARENA, 8, "slots of optimizer"),)
    engine, cache = share(ENGINE_WEIGHTS, 2), share(KV_CACHE, 25.5)
    phases = (
        PhaseMemory("publish", (actor, engine, share("handoff", 0.5)), asleep),
        PhaseMemory("generate", (actor, engine, cache), asleep),
        PhaseMemory("score_actor", (actor, share(ACTIVATIONS, 0.004)), asleep),
        PhaseMemory("update", (actor, optimizer, share(ACTIVATIONS, 20)), moment="backward"),
        PhaseMemory("update", (actor, optimizer, share("updating", 1)), moment="optimizer step"),
    )
    budget = Budget(
        None if device_gigabytes is None else int(device_gigabytes * GB),
        None if host_gigabytes is None else int(host_gigabytes * GB),
        ranks_per_host=8,
    )
    reasons = {
        "memory.offload": "the KV cache would have 17.5 GB without it",
        "kv_cache_memory_bytes": "what is left",
        "optimizer.tokens_per_micro_batch": "the default on a GPU",
    }
    return MemoryPlan(
        4, "cuda", budget, Choices((OPTIMIZER,), False, 25 * GB, 16384, reasons), phases, ("prompts of 512 tokens",)
    )


def plan(memory_plan: MemoryPlan | None = None, remedies: tuple[str, ...] = ()) -> RunPlan:
    """A whole plan."""
    links = {"local": Traffic(4 * GB, 2 * GB), "host": Traffic(12 * GB, 6 * GB), "remote": Traffic()}
    seconds = {"rollout": 60.0, "scoring": 5.0, "update": 30.0, "handoff": 1.0, "sleep and wake": 4.0}
    return RunPlan(
        "model, 1.00 B parameters: grpo, vllm, 4 ranks",
        CYCLE,
        memory_plan or memory(),
        remedies,
        HandoffPlan("vllm gets each element once", links, Traffic(16 * GB, 8 * GB), 0, 12 * GB, "traces in files"),
        StepTime(seconds, ("H100: 989 TFLOP/s",)),
        workload="16 prompts x 8 completions a step, up to 1,024 + 512 tokens",
    )
