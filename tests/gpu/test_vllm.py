"""vLLM without graphs and compiled layers: what the traced write, sleep and wake do by themselves."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.gpu.vllm_cases import *  # noqa: F403  its tests and their fixture

if find_spec("vllm") is None:
    pytest.skip("needs vllm (constraints-cuda.txt)", allow_module_level=True)

pytestmark = pytest.mark.slow
SETTINGS = {"enforce_eager": True}
