"""The bench of a hybrid worker, as tests of the training arithmetic have it."""

from tests.unit.training.conftest import make_bench

__all__ = ["make_bench"]
