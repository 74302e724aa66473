from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from hybrid_rl.compat import torch as private


def test_a_skipped_first_step_is_no_mistake() -> None:
    """PyTorch warns if a schedule steps before its optimizer was called; after mark_stepped it does not."""
    for is_marked in (False, True):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        if is_marked:
            private.mark_stepped(optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            schedule.step()
        assert bool(told) is not is_marked


def test_a_schedule_goes_on_where_it_is_put() -> None:
    """Learning rates 1, 1/2, 1/3, ...: at step 3 the rate is 1/4, and after it 1/5."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    private.set_schedule(schedule, 3, [0.25])
    private.mark_stepped(optimizer)
    assert schedule.get_last_lr() == [0.25]
    schedule.step()
    assert schedule.get_last_lr() == [0.2] and schedule.last_epoch == 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_one_memory(device: str) -> None:
    tensor, other = torch.empty(4, 2, device=device), torch.empty(4, 2, device=device)
    view = tensor.t()[1]
    assert private.storage_id(tensor) == private.storage_id(view) != private.storage_id(other)
    assert private.base_of(view) is tensor and private.base_of(tensor) is None
    before = private.version_of(view)
    tensor.add_(1)
    assert private.version_of(view) == before + 1


def test_what_an_operator_writes() -> None:
    written = [a.name for a in private.schema_of(torch.ops.aten.add_.Tensor).arguments if a.alias_info is not None]
    assert written == ["self"]


def test_the_parts_of_an_axis() -> None:
    """Chunks of 2 of 5 rows for 4 ranks: 2, 2, 1 and none."""
    parts = private.split_over_axis(Shard(0), torch.arange(5), 4)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], []]


def test_the_compiled_form_is_taken_back() -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    module = Double()
    private.use_compiled(module, lambda x: x + 100)
    assert private.is_compiled(module) and module(torch.tensor(3.0)) == 103
    private.use_compiled(module, None)
    assert not private.is_compiled(module) and module(torch.tensor(3.0)) == 6


def test_the_attributes_of_a_module() -> None:
    module = nn.BatchNorm1d(2)
    module.mine = "x"
    assert private.plain_attributes(module)["mine"] == "x"
    assert not {"_parameters", "_buffers", "_modules"} & private.plain_attributes(module).keys()
    private.apply_to_tensors(module, lambda tensor: tensor + 1 if tensor.is_floating_point() else tensor)
    assert module.weight.tolist() == [2, 2] and module.running_mean.tolist() == [1, 1]


def test_hooks_before_the_forward() -> None:
    module = nn.Linear(1, 1)
    assert private.forward_pre_hooks(module) == []
    module.register_forward_pre_hook(print)
    assert private.forward_pre_hooks(module) == [print]


def test_norms_in_one_launch() -> None:
    norms = private.foreach_norm([torch.tensor([3.0, 4.0]), torch.zeros(2)])
    assert [float(norm) for norm in norms] == [5.0, 0.0]
