"""What all tests share: no hubs, no windows, fixed seeds, and markers that skip with their reason."""

from __future__ import annotations

import importlib.util
import os
import random

# Before any test imports them: hubs are never asked, and pictures are drawn without a display.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Models of a few thousand parameters: more threads only wait for each other, on a busy machine many times longer.
torch.set_num_threads(1)
if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may do without
    from hypothesis import settings

    # How long an example takes is the machine's business.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run; `-ra` prints why."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = "needs vllm: pip install hybrid_rl[vllm]"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random state, in whatever order tests run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
