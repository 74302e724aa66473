"""A handoff of zero bytes is proved, not believed: every way in which two tensors are not the same memory."""

import pytest
import torch
from torch import nn

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.tensor import TensorSource, check_shared


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
    layout = TensorSource.of(module).weight_layout()
    names = [spec.name for spec in layout.tensors]
    assert names == sorted(names)
    assert "2.weight" in names
    assert "3.weight" not in names
    # fp32: 12 + 4, 4 * 4 of the norm, 12 + 3 and 3; int64: the norm's counter.
    assert layout.num_bytes == 4 * (16 + 16 + 15 + 3) + 8


def test_the_digest_tells_layouts_apart(module):
    layout = TensorSource.of(module).weight_layout()
    assert layout.digest() == TensorSource.of(module).weight_layout().digest()
    assert layout.digest() != TensorSource.of(module.double()).weight_layout().digest()
