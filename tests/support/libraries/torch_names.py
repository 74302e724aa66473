"""Names of torch that tests need; those that the library needs are in `compat/torch.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten as tree_flatten

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def forward_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run after the module's forward."""
    return list(module._forward_hooks.values())


def no_recompiles() -> AbstractContextManager[Any]:
    """Fail if torch compiles anew what it has compiled before."""
    from torch._dynamo import config

    return config.patch(error_on_recompile=True)


def compute_shape_and_offset(*arguments: Any, **options: Any) -> Any:
    """Shape and offset of a shard whose parts are strided."""
    from torch.distributed.tensor import _utils

    return _utils._compute_local_shape_and_global_offset(*arguments, **options)


def fsdp_state(module: nn.Module) -> Any:
    """What FSDP2 keeps of a module."""
    return module._get_fsdp_state()  # type: ignore[operator]


def gathered(parameter: Any) -> Tensor | None:
    """The whole of a parameter of FSDP2, with its gradient; None if it was never gathered."""
    return getattr(parameter, "_unsharded_param", None)


def shard_of(parameter: Any) -> Tensor:
    """A rank's part of a parameter of FSDP2, whatever is gathered now."""
    shard: Tensor = parameter._sharded_param_data
    return shard


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Put a rank's part of a DTensor into other memory."""
    tensor._local_tensor = local


def storage_number(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one lives."""
    number: int = storage._cdata
    return number


def let_segments_grow() -> None:
    """Have memory of CUDA allocated in segments that grow."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def releases_exported_memory() -> bool:
    """Whether this torch can let go of CUDA memory that was exported."""
    return callable(torch.UntypedStorage._release_ipc_counter_cuda)


def inductor_folder() -> str:
    """Where torch.compile keeps what it has compiled."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder: str = default_cache_dir()
    return folder
