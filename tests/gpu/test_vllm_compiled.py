"""vLLM as users run it: compiled layers, and CUDA graphs that are replayed after the memory slept."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.gpu.vllm_cases import *  # noqa: F403  its tests and their fixture

if find_spec("vllm") is None:
    pytest.skip("needs vllm (constraints-cuda.txt)", allow_module_level=True)

pytestmark = pytest.mark.slow
SETTINGS = {"enforce_eager": False}
