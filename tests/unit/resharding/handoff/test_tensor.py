"""A handoff of zero bytes is proved, not believed: every way in which two tensors are not the same memory."""

import pytest
import torch
from torch import nn

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.tensor import TensorSource, check_shared
from tests.unit.resharding.handoff.parts import empty_engine, engine_trace, expected, globals_of, is_equal, plan_of


@pytest.fixture
def module():
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    made.append(nn.Linear(4, 3))
    return made


def tensors(module):
    return dict(TensorSource.of(module).tensors)


def test_the_same_memory_is_accepted_under_other_tensor_objects(module):
    views = {name: tensor.detach().view(tensor.shape) for name, tensor in tensors(module).items()}
    # Two weights and biases, scale and shift of the norm, and its three buffers.
    assert check_shared(TensorSource(views), tensors(module)) == 4 + 2 + 3


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clone(),
        lambda t: t[1:],
        lambda t: t.view(3, 4),
        lambda t: t.view(-1).as_strided((4, 3), (1, 4)),
        lambda t: t.view(torch.int32),
    ],
    ids=["memory", "offset", "shape", "stride", "dtype"],
)
def test_what_is_not_the_same_view_of_the_same_memory_is_refused(module, change):
    engine = tensors(module)
    engine["0.weight"] = change(engine["0.weight"].detach())
    with pytest.raises(HandoffError, match="'0.weight' is not the trainer's own tensor"):
        check_shared(TensorSource.of(module), engine)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_name_that_one_side_lacks_is_refused(module, side):
    mine, theirs = tensors(module), tensors(module)
    del (mine if side == "trainer" else theirs)["1.running_var"]
    with pytest.raises(HandoffError, match=r"differ in 1 weights, e\.g\. \['1\.running_var'\]"):
        check_shared(TensorSource(mine), theirs)


def test_a_tied_weight_is_listed_once_and_in_the_order_of_names(module):
    module[2].weight = nn.Parameter(torch.zeros(3, 4))
    module.append(nn.Linear(4, 3))
    module[3].weight = module[2].weight
    specs = [sharded.spec for sharded in TensorSource.of(module).layout().tensors]
    names = [spec.name for spec in specs]
    assert names == sorted(names)
    assert "2.weight" in names
    assert "3.weight" not in names
    # fp32: 12 + 4, 4 * 4 of the norm, 12 + 3 and 3; int64: the norm's counter.
    assert sum(spec.num_bytes for spec in specs) == 4 * (16 + 16 + 15 + 3) + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_engine_of_its_own_memory_gets_every_version(dtype):
    tensors = globals_of()
    source = TensorSource(tensors)
    trace = engine_trace(tensors, 0, 1, dtype)
    plan, engine = plan_of(trace, source.layout(), 0), empty_engine(trace)
    for version in range(2):
        for tensor in tensors.values():
            tensor.mul_(1.5)
        with source.opened(version):
            delivered = source.deliver(plan, engine)
        assert is_equal(engine, expected(tensors, 0, 1, dtype))
        assert delivered.link_bytes == {"local": sum(4 * t.numel() for t in engine)} and delivered.staging_bytes == 0
        assert delivered.num_bytes == sum(t.nbytes for t in engine)
    assert source.full("q").data_ptr() == tensors["q"].data_ptr()
    with pytest.raises(HandoffError, match="the trainer has no weight 'absent'"):
        source.full("absent")


def test_weights_that_are_not_one_piece_of_memory_are_refused():
    tensors = {"q": torch.zeros(4, 3).T}
    with pytest.raises(HandoffError, match=r"1 weights are sharded or not contiguous, e\.g\. \['q'\]"):
        TensorSource(tensors).held()
