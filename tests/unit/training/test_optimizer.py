"""The optimizer against a written-out AdamW on fp32 masters, and against bad gradients."""

import copy
import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybrid_rl.compat.torch import TorchDispatchMode
from hybrid_rl.config import OptimizerConfig
from hybrid_rl.errors import ModelError
from hybrid_rl.training.optimizer import Optimizer
from tests.support.inside.training import mesh_of
from tests.support.libraries.torch_names import FakeStore

LR = 1e-2


def make(dtype: torch.dtype = torch.float32, *, num_optimizer_steps: int = 10, **keys) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype)
    settings = {"learning_rate": LR, "max_grad_norm": None} | keys
    return module, Optimizer(module, OptimizerConfig(**settings), num_optimizer_steps=num_optimizer_steps)


def gradients(module: nn.Module, step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(p.shape, generator=generator).to(p.dtype) for p in module.parameters()]


def take_step(module: nn.Module, optimizer: Optimizer, step: int, micro_batches: int = 1, scale: float = 1.0):
    for micro in range(micro_batches):
        for parameter, gradient in zip(module.parameters(), gradients(module, 10 * step + micro, scale), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.accumulate()
    return optimizer.step()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_written_out_adamw_on_masters(dtype: torch.dtype) -> None:
    """Decoupled weight decay on matrices, bias correction, fp32 accumulation over two micro-batches; what the module
    holds is the rounded master."""
    beta1, beta2, epsilon, decay = 0.8, 0.95, 1e-6, 0.1
    module, optimizer = make(dtype, adam_beta1=beta1, adam_beta2=beta2, adam_epsilon=epsilon, weight_decay=decay)
    masters = [w.double() for w in weights(module)]
    first, second = [torch.zeros_like(m) for m in masters], [torch.zeros_like(m) for m in masters]
    for step in range(1, 6):
        parts = [gradients(module, 10 * step + micro) for micro in range(2)]
        take_step(module, optimizer, step, micro_batches=2)
        for index, master in enumerate(masters):
            gradient = sum(part[index].double() for part in parts)
            if master.dim() >= 2:
                master.mul_(1 - LR * decay)
            first[index] = beta1 * first[index] + (1 - beta1) * gradient
            second[index] = beta2 * second[index] + (1 - beta2) * gradient**2
            root = (second[index] / (1 - beta2**step)).sqrt() + epsilon
            master.sub_(LR * first[index] / (1 - beta1**step) / root)
    kept = optimizer.state_dict()["master"].values() or weights(module)
    for parameter, master, expected in zip(weights(module), kept, masters, strict=True):
        torch.testing.assert_close(master.double(), expected, rtol=0, atol=1e-6)  # float32 arithmetic, 5 steps
        assert torch.equal(parameter, master.to(dtype))


def test_clipping_scales_the_whole_gradient() -> None:
    """SGD-like view: with beta1 = 0 the first moment is the clipped gradient itself."""
    module, optimizer = make(max_grad_norm=0.5, adam_beta1=0.0)
    raw = torch.cat([g.flatten() for g in gradients(module, 0)])
    norm, updated = take_step(module, optimizer, 0)
    assert updated
    assert norm == pytest.approx(raw.norm().item(), rel=1e-6)
    clipped = torch.cat([moment.flatten() for moment in optimizer.state_dict()["exp_avg"].values()])
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_no_number_changes_nothing_but_the_schedule(dtype: torch.dtype, bad: float) -> None:
    module, optimizer = make(dtype, lr_scheduler_type="linear", max_grad_norm=1.0)
    take_step(module, optimizer, 0)
    before, state = weights(module), copy.deepcopy(optimizer.state_dict())
    assert optimizer.learning_rate == pytest.approx(LR * 0.9)
    next(module.parameters()).grad = torch.full((3, 4), bad, dtype=dtype)
    optimizer.accumulate()
    norm, updated = optimizer.step()
    assert not updated
    assert not math.isfinite(norm)
    assert all(map(torch.equal, weights(module), before))
    after = optimizer.state_dict()
    for kind in ("master", "exp_avg", "exp_avg_sq", "step"):
        assert after[kind].keys() == state[kind].keys()
        assert all(map(torch.equal, after[kind].values(), state[kind].values()))
    assert optimizer.learning_rate == pytest.approx(LR * 0.8)
    assert not any(gradient.any() for gradient in optimizer.gradients())
    assert take_step(module, optimizer, 1)[1]


@pytest.mark.parametrize(
    ("name", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant_with_warmup", 2, [0, 0.5, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0, 0.5, 1, 0.5]),
    ],
)
def test_schedules(name: str, warmup: int, expected: list[float]) -> None:
    module, optimizer = make(num_optimizer_steps=4, lr_scheduler_type=name, warmup_steps=warmup)
    rates = []
    for step in range(4):
        rates.append(optimizer.learning_rate / LR)
        take_step(module, optimizer, step)
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_round_trip_is_bit_exact(dtype: torch.dtype, tmp_path) -> None:
    keys = {"lr_scheduler_type": "cosine", "weight_decay": 0.1, "max_grad_norm": 1.0}
    straight, optimizer = make(dtype, **keys)
    for step in range(2):
        take_step(straight, optimizer, step)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed, other = make(dtype, **keys)
    resumed.load_state_dict(straight.state_dict())
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.learning_rate == optimizer.learning_rate
    for step in range(2, 5):
        take_step(straight, optimizer, step)
        take_step(resumed, other, step)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
    assert other.num_bytes == optimizer.num_bytes


@pytest.mark.parametrize(("dtype", "per_parameter"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_bytes_of_moments_and_masters(dtype: torch.dtype, per_parameter: int) -> None:
    """Two fp32 moments; with bf16 parameters an fp32 master too. A step counter of 4 bytes for each of 6 tensors.
    Gradients beside them are in fp32, and none in bf16: 2 + 12 + 4 bytes per parameter."""
    module, optimizer = make(dtype)
    assert optimizer.num_bytes == per_parameter * sum(p.numel() for p in module.parameters()) + 6 * 4
    for parameter, gradient in zip(module.parameters(), gradients(module, 0), strict=True):
        parameter.grad = gradient
    optimizer.accumulate()
    assert {gradient.dtype for gradient in optimizer.gradients()} == {torch.float32}
    assert all((parameter.grad is None) == (dtype == torch.bfloat16) for parameter in module.parameters())


def test_a_resumed_run_takes_its_moments_and_the_rates_of_its_own_config() -> None:
    module, optimizer = make(lr_scheduler_type="linear", weight_decay=0.1)
    for step in range(4):
        take_step(module, optimizer, step)
    again, resumed = make(lr_scheduler_type="linear", learning_rate=LR / 10, adam_beta1=0.5, weight_decay=0.3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.learning_rate == pytest.approx(LR / 10 * 6 / 10)  # four of ten steps are done
    moments = [made.state_dict()["exp_avg"]["0.weight"].clone() for made in (optimizer, resumed)]
    assert torch.equal(*moments)
    before = again[0].weight.detach().clone()
    take_step(again, resumed, 4)
    gradient, after = gradients(again, 40)[0], resumed.state_dict()
    torch.testing.assert_close(after["exp_avg"]["0.weight"], 0.5 * moments[0] + 0.5 * gradient)  # its own beta1
    assert after["step"]["0.weight"] == 5
    first = after["exp_avg"]["0.weight"] / (1 - 0.5**5)
    second = after["exp_avg_sq"]["0.weight"] / (1 - 0.999**5)
    update = before * 0.3 + first / (second.sqrt() + 1e-8)  # its own weight decay
    torch.testing.assert_close(again[0].weight.detach(), before - LR / 10 * 6 / 10 * update)


class Operators(TorchDispatchMode):
    """Names of the operators that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_gradients_of_all_parameters_are_taken_over_in_one_call() -> None:
    module, optimizer = make(torch.bfloat16)
    for expected in ("aten::_foreach_copy_", "aten::_foreach_add_.List"):
        for parameter, gradient in zip(module.parameters(), gradients(module, 1), strict=True):
            parameter.grad = gradient
        with Operators() as operators:
            optimizer.accumulate()
        assert [name for name in operators.names if "empty" not in name and "detach" not in name] == [expected]


def test_an_optimizer_step_reads_one_number() -> None:
    module, optimizer = make(torch.bfloat16, max_grad_norm=1.0)
    for parameter, gradient in zip(module.parameters(), gradients(module, 1), strict=True):
        parameter.grad = gradient
    optimizer.accumulate()
    with Operators() as operators:
        optimizer.step()
    # PyTorch's fused AdamW looks at its step counters nowhere, and clipping scales by a tensor.
    assert operators.names.count("aten::_local_scalar_dense") == 1


def test_slices_of_gradients_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1 << 28, 1, 12):
        monkeypatch.setattr("hybrid_rl.training.optimizer.SLICE_ELEMENTS", size)
        module, optimizer = make(torch.bfloat16)
        take_step(module, optimizer, 1, micro_batches=3)
        found.append(weights(module))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def through_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.data.copy_(values)  # the parameter does not count it as a change


def in_place(parameter: nn.Parameter, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def replaced(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.data = values.clone()


def changed_of(optimizer: Optimizer) -> list[str]:
    return [name for name, was in zip(optimizer.names, optimizer.take_over().tolist(), strict=True) if was]


@pytest.mark.parametrize("change", [through_data, in_place, replaced])
def test_masters_follow_numbers_that_somebody_else_writes(change) -> None:
    """Two numbers of one weight; what was not touched keeps what bf16 cannot hold, so that the next update is that of
    an optimizer whose masters were set by hand."""
    module, optimizer = make(torch.bfloat16, learning_rate=1e-4)
    expected, its = make(torch.bfloat16, learning_rate=1e-4)
    for step in range(3):
        take_step(module, optimizer, step)
        take_step(expected, its, step)
    assert changed_of(optimizer) == []
    weight, master = module[0].weight, its.state_dict()["master"]["0.weight"]
    assert not torch.equal(master, master.bfloat16().float())
    values = weight.detach().clone()
    values[0, 1], values[2, 3] = 7.0, float("nan")
    change(weight, values)
    master[0, 1], master[2, 3] = 7.0, float("nan")
    assert changed_of(optimizer) == ["0.weight"]
    assert torch.equal(optimizer.state_dict()["master"]["0.weight"].nan_to_num(-1), master.nan_to_num(-1))
    assert changed_of(optimizer) == []
    in_place(weight, values.nan_to_num(1.0))
    master[2, 3] = 1.0
    assert changed_of(optimizer) == ["0.weight"]
    take_step(module, optimizer, 3)
    take_step(expected, its, 3)
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


def test_masters_of_parameters_that_stay_in_fp32_follow_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3).bfloat16(), nn.LayerNorm(3))
    optimizer = Optimizer(module, OptimizerConfig(learning_rate=LR), num_optimizer_steps=10)
    assert changed_of(optimizer) == []
    in_place(module[1].bias, torch.tensor([0.1, 0.0, 0.0]))
    assert changed_of(optimizer) == ["1.bias"]
    assert torch.equal(optimizer.state_dict()["master"]["1.bias"], torch.tensor([0.1, 0.0, 0.0]))


@pytest.fixture
def world():
    """A process group of 4 ranks of which only rank 0 is there: nothing can be communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_parameters_are_all_sharded_alike(world) -> None:
    """Over 2 x 2 ranks, copied over the first axis: two ranks hold each number."""
    mesh, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))

    def optimizer_of(*weights: torch.Tensor) -> Optimizer:
        module = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in zip("ab", weights, strict=True)})
        return Optimizer(module, OptimizerConfig(learning_rate=LR), num_optimizer_steps=1)

    def sharded(mesh, *placements) -> torch.Tensor:
        return DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)

    copied = sharded(mesh, Replicate(), Shard(0))
    optimizer = optimizer_of(copied, sharded(mesh, Replicate(), Shard(1)))
    assert mesh_of(optimizer) == (mesh, 2)
    for other in (torch.ones(2, 3), sharded(line, Shard(0)), sharded(mesh, Shard(0), Replicate())):
        with pytest.raises(ModelError, match="parameters a, b are sharded over several meshes, or copied over differ"):
            optimizer_of(copied, other)


def test_fp32_is_torch_adamw_bit_for_bit() -> None:
    module, optimizer = make(weight_decay=0.1)
    theirs = copy.deepcopy(module)
    matrices = [p for p in theirs.parameters() if p.dim() >= 2]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    assert (len(matrices), len(vectors)) == (2, 4)
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=LR, fused=True
    )
    for step in range(3):
        take_step(module, optimizer, step)
        for parameter, gradient in zip(theirs.parameters(), gradients(theirs, 10 * step), strict=True):
            parameter.grad = gradient
        adamw.step()
    assert all(map(torch.equal, module.parameters(), theirs.parameters()))
