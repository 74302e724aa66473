"""The plan of the house as data: rooms, layers, who may import whom, and the limits of size."""

from __future__ import annotations

import re

PACKAGE = "hybrid_rl"

# Lowest first. A room is a module or a package directly under hybrid_rl/; it imports from lower lines only.
# ROOT is hybrid_rl/__init__.py, the users' door: only the top line may come in through it.
ROOT = "__init__"
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"compat", "errors", "process"}),
    frozenset({"weights", "algos", "batch", "memory", "data", "metrics"}),
    frozenset({"config", "controller", "models", "resharding"}),
    frozenset({"agents", "engines", "checkpoint", "rewards"}),
    frozenset({"vllm", "rollout", "training", "logging"}),
    frozenset({"workers", "planning"}),
    frozenset({"run"}),
    frozenset({"extras"}),
    frozenset({ROOT}),
    frozenset({"cli", "__main__"}),
)

# Exceptions to "siblings do not import each other": (importing room, imported room).
SIBLINGS_ALLOWED = frozenset({("__main__", "cli"), ("compat", "errors")})

# What is not on the way from prompt to weights. Of the core one file names its modules, to import them when asked; the
# users' door and the command line are above both.
EXTRAS, HOOKS = "extras", "hybrid_rl/process/hooks.py"
ABOVE_EXTRAS = frozenset({EXTRAS, ROOT, "cli", "__main__"})

# Of the core, which is what the extras stand on: its rooms, and the most of them that import one another in a row.
CORE_ROOMS, CORE_CHAIN = 24, 8

# File names of the package that may occur more than once: of rooms' doors, of what others are derived from, and of
# rewards and environments that are named after the library they are for.
SHARED_FILE_NAMES = frozenset({"__init__", "base", "verifiers"})

# How many files under tests/ may read attributes of others that begin with an underscore.
PRIVATE_TEST_FILES = 36

# A room listed here imports nothing else of the package, whatever the layers say.
ONLY_IMPORTS: dict[str, frozenset[str]] = {"algos": frozenset({"algos", "errors"})}

# A library and the places (files, or folders with a slash) that may import it.
LIBRARY_HOMES: dict[str, tuple[str, ...]] = {
    "vllm": ("hybrid_rl/vllm/", "hybrid_rl/compat/vllm.py"),
    "ray": ("hybrid_rl/controller/ray_backend.py", "hybrid_rl/compat/ray.py"),
    "omegaconf": ("hybrid_rl/config/load.py",),
}

# Private names of other libraries stand here only. Python's own, and operators (torch.ops.aten._x), are found by name.
COMPAT = "hybrid_rl/compat/"
PRIVATE_NAMES_ALLOWED = frozenset({"_asdict", "_current_frames", "_fields", "_make", "_replace"})
# Of flash-attn, which has no others: the package is optional, and its names are looked up in one place.
PRIVATE_NAMES_LEFT = frozenset({"_flash_attn_varlen_backward", "_flash_attn_varlen_forward"})

# torch.ops is the door to the extension; PyTorch's own operators may be named anywhere.
EXTENSION_HOME = "hybrid_rl/compat/native.py"
TORCH_OPS_ALLOWED = frozenset({"aten", "prims", "mkldnn", "_c10d_functional"})

# The page that shows the rooms to a reader: a table `| layer | room | contents |` under this heading.
MAP, MAP_HEADING = "docs/architecture.md", "## Rooms"

# Names that a file must not hold at all, comments included.
UNMENTIONABLE: dict[str, re.Pattern[str]] = {
    "hybrid_rl/run/trainer.py": re.compile(
        r"\b(?:torch\.distributed|vllm|ray)\b|\bfrom torch import\b.*\bdistributed\b"
    ),
}

MEASURED = ("hybrid_rl", "recipes", "benchmarks", "setup.py", "install.py")
MAX_FILE_LINES = 350  # of code: docstrings, comments and blank lines do not count
MAX_FUNCTION_LINES = 100

# Paths that exist on one machine only. A path that starts a word; URLs and relative paths do not count.
MACHINE_PATH = re.compile(
    r"(?<![\w./:~-])/(?:home|root|Users|work|workspace|mnt|scratch|opt|tmp)/[\w.-]+|\b[A-Za-z]:\\Users\\"
)
# Folders that are not part of the project, for trees without git.
NOT_OURS = frozenset({".git", ".venv", "build", "dist", "runs", "__pycache__", "node_modules"})
