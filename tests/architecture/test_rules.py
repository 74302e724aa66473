"""Each rule of the house can fail, and lets pass what it should: small synthetic trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import layers, rules

Tree = dict[str, str]


def write(root: Path, tree: Tree) -> Path:
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


# A docstring, comments and blank lines beside as much code as is allowed.
EXPLAINED = '"""What.\n\nAnd why.\n"""\n' + "x = 1\n" * 350 + "# a comment\n\n" * 100
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 100
HOME = "/".join(["", "home", "someone", "models"])  # in pieces, so that this file keeps the rule itself
MAP = "## Rooms\n" + "".join(
    f"| {number} | {', '.join(f'`{room}`' for room in sorted(line))} | x |\n"
    for number, line in enumerate(layers.LAYERS, start=1)
)

# Names that a file defines itself, of a class, a function, an argument and a module.
OWN_PRIVATE = """
class A:
    def __init__(self, other):
        self._x = other._x + other._g

    def _g(self):
        _h(_k=self.__dict__)


def _h(_k):
    from . import _b
"""

# rule, tree, and a part of the one finding that it must give
BROKEN: list[tuple[Callable[[Path], list[str]], Tree, str]] = [
    (rules.layers, {"hybrid_rl/batch.py": "import hybrid_rl.workers.base"}, "batch.py:1: batch imports workers"),
    (rules.layers, {"hybrid_rl/data/a.py": "from hybrid_rl import run"}, "data imports run, which is above"),
    (rules.layers, {"hybrid_rl/data/a.py": "from hybrid_rl import Trainer"}, "data imports __init__, which is above"),
    (rules.layers, {"hybrid_rl/data/a.py": "from ..batch import b"}, "data imports its sibling batch"),
    (rules.layers, {"hybrid_rl/data/__init__.py": "from ..batch import b"}, "data imports its sibling batch"),
    (
        rules.layers,
        {"hybrid_rl/models/a.py": "from hybrid_rl.engines import b"},
        "models imports engines, which is above it",
    ),
    (rules.layers, {"hybrid_rl/errors.py": "from hybrid_rl.batch import B"}, "errors imports batch, which is above"),
    (rules.layers, {"hybrid_rl/metrics.py": "from hybrid_rl.batch import B"}, "metrics imports its sibling batch"),
    (rules.layers, {"hybrid_rl/batch.py": "def f():\n    import hybrid_rl.run.trainer"}, "batch.py:2: batch imports"),
    (
        rules.layers,
        {"hybrid_rl/batch.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hybrid_rl.run import a"},
        "batch.py:3: batch imports run",
    ),
    (rules.layers, {"hybrid_rl/utils.py": ""}, "room 'utils' is not in the table"),
    (rules.layers, {"hybrid_rl/run/trainer.py": "import hybrid_rl.utils"}, "imports room 'utils', which is not"),
    (
        rules.layers,
        {"hybrid_rl/batch.py": 'import importlib\nm = importlib.import_module("hybrid_rl.run.trainer")'},
        "batch.py:2: batch imports run",
    ),
    (rules.only_imports, {"hybrid_rl/algos/a.py": "from hybrid_rl.batch import Batch"}, "algos imports batch"),
    (
        rules.cycles,
        {"hybrid_rl/data/a.py": "from hybrid_rl.data.b import x", "hybrid_rl/data/b.py": "def f(): from . import a"},
        "hybrid_rl.data.a, hybrid_rl.data.b",
    ),
    (
        rules.cycles,
        {"hybrid_rl/data/__init__.py": "from .a import x", "hybrid_rl/data/a.py": "from hybrid_rl.data import y"},
        "hybrid_rl.data, hybrid_rl.data.a",
    ),
    (rules.cycles, {"hybrid_rl/batch.py": "import hybrid_rl.batch"}, "import cycle: hybrid_rl.batch"),
    (
        rules.subfolders,
        {
            "hybrid_rl/data/a.py": "from hybrid_rl.data.x.c import f",
            "hybrid_rl/data/b.py": "",
            "hybrid_rl/data/x/c.py": "from hybrid_rl.data import b",
        },
        "circle of folders: hybrid_rl/data, hybrid_rl/data/x",
    ),
    (
        rules.subfolders,
        {
            "hybrid_rl/data/x/a.py": "from hybrid_rl.data.y.b import f",
            "hybrid_rl/data/x/d.py": "",
            "hybrid_rl/data/y/b.py": "from hybrid_rl.data.z.c import f",
            "hybrid_rl/data/z/c.py": "def f():\n    from hybrid_rl.data.x import d",
        },
        "circle of folders: hybrid_rl/data/x, hybrid_rl/data/y, hybrid_rl/data/z",
    ),
    (rules.sizes, {"recipes/grpo.py": "x = 1\n" * 351}, "351 lines of code; at most 350"),
    (rules.sizes, {"recipes/grpo.py": 'x = """\n' + "\n" * 349 + '"""\n'}, "351 lines of code; at most 350"),
    (rules.sizes, {"setup.py": LONG_FUNCTION}, "f has 101 lines; at most 100"),
    (rules.sizes, {"benchmarks/a/b.py": LONG_FUNCTION.replace("def", "async def")}, "f has 101 lines"),
    (rules.libraries, {"hybrid_rl/engines/base.py": "def f():\n    from vllm import LLM"}, "base.py:2: imports vllm"),
    (rules.libraries, {"hybrid_rl/controller/group.py": "import ray.util"}, "imports ray"),
    (rules.libraries, {"recipes/grpo.py": "import omegaconf"}, "imports omegaconf"),
    (
        rules.private_names,
        {"hybrid_rl/data/a.py": "def f(x):\n    return x.grad._base"},
        "a.py:2: uses the private name _base",
    ),
    (
        rules.private_names,
        {"hybrid_rl/data/a.py": "def f(x): return getattr(x, '_base', None)"},
        "the private name _base",
    ),
    (rules.private_names, {"hybrid_rl/data/a.py": "import torch._dynamo"}, "the private name _dynamo"),
    (rules.private_names, {"hybrid_rl/data/a.py": "from torch.utils._pytree import tree_map"}, "name _pytree"),
    (rules.private_names, {"hybrid_rl/data/a.py": "from torch.x import _Shard"}, "the private name _Shard"),
    (rules.private_names, {"hybrid_rl/data/a.py": "f(_temp_dir=1)"}, "the private name _temp_dir"),
    (rules.private_names, {"hybrid_rl/data/a.py": "def f(x): x._calls = 1"}, "the private name _calls"),
    (rules.extension, {"hybrid_rl/engines/sampling.py": "import torch\ntorch.ops.hybrid_rl.f()"}, "uses torch.ops"),
    (rules.extension, {"hybrid_rl/memory/region.py": "from torch import ops"}, "imports the extension"),
    (rules.extension, {"hybrid_rl/memory/region.py": "import torch as t\nt.ops.load_library(1)"}, "calls load_library"),
    (rules.hooks, {"hybrid_rl/run/a.py": "load('hybrid_rl.extras.report')"}, "a.py:1: names hybrid_rl.extras; only"),
    (rules.hooks, {"hybrid_rl/run/a.py": "from hybrid_rl import extras"}, "names hybrid_rl import extras"),
    (rules.unmentionables, {"hybrid_rl/run/trainer.py": "# as in ray"}, "run/trainer.py:1: names 'ray'"),
    (rules.unmentionables, {"hybrid_rl/run/trainer.py": "\nx = config.rollout.vllm"}, "run/trainer.py:2: names 'vllm'"),
    (rules.unmentionables, {"hybrid_rl/run/trainer.py": "import torch.distributed as d"}, "names 'torch.distributed'"),
    (rules.unmentionables, {"hybrid_rl/run/trainer.py": "from torch import nn, distributed"}, "distributed"),
    (rules.docstrings, {"hybrid_rl/batch.py": "def split():\n    pass"}, "public split has no docstring"),
    (rules.docstrings, {"hybrid_rl/data/a.py": "class Sampler:\n    x = 1"}, "public Sampler has no docstring"),
    (rules.docstrings, {"hybrid_rl/__init__.py": "async def f(): pass"}, "public f has no docstring"),
    (rules.machine_paths, {"docs/a.md": f"see\n{HOME}"}, "docs/a.md:2: names the path"),
    (rules.machine_paths, {"recipes/grpo.py": f'MODEL = "{HOME}"'}, "recipes/grpo.py:1: names the path"),
    (rules.machine_paths, {"a.txt": HOME.replace("home", "Users")}, "names the path"),
    (rules.architecture_map, {layers.MAP: MAP + "`training/gone.py`"}, "names training/gone.py, which does not exist"),
    (rules.architecture_map, {layers.MAP: MAP.replace("`training`", "x")}, "'training' in layer None, which is in 5"),
    (rules.architecture_map, {layers.MAP: MAP + "| 3 | `training` | x |"}, "'training' in layer 3, which is in 5"),
    (rules.architecture_map, {layers.MAP: MAP + "| | `attic` | x |"}, "'attic' in layer 10, which is in None"),
]

# Trees that look alike and keep the rule
KEPT: list[tuple[Callable[[Path], list[str]], Tree]] = [
    (rules.layers, {"hybrid_rl/__init__.py": "from hybrid_rl.run.trainer import Trainer"}),
    (rules.layers, {"hybrid_rl/cli.py": "from hybrid_rl import Trainer"}),
    (rules.layers, {"hybrid_rl/rollout/a.py": "from hybrid_rl.models import b\nfrom . import c\nimport torch"}),
    (rules.layers, {"hybrid_rl/batch.py": "from hybrid_rl.errors import DataError"}),
    (rules.only_imports, {"hybrid_rl/algos/a.py": "from . import b\nfrom hybrid_rl.errors import ConfigError"}),
    (
        rules.cycles,
        {
            "hybrid_rl/__init__.py": "from .data import a",
            "hybrid_rl/data/__init__.py": "from .a import x",
            "hybrid_rl/data/a.py": "from hybrid_rl.data.b import y",
            "hybrid_rl/data/b.py": "from hybrid_rl.errors import DataError",
            "hybrid_rl/errors.py": "",
        },
    ),
    (
        rules.subfolders,
        {
            "hybrid_rl/data/__init__.py": "from .x.a import f",
            "hybrid_rl/data/b.py": "from hybrid_rl.errors import E",
            "hybrid_rl/data/x/a.py": "from hybrid_rl.data.b import E",
        },
    ),
    (rules.sizes, {"hybrid_rl/batch.py": EXPLAINED, "recipes/a.py": LONG_FUNCTION.removesuffix("    x = 1\n")}),
    (rules.sizes, {"tests/unit/test_batch.py": "x = 1\n" * 351}),
    (rules.libraries, {"hybrid_rl/vllm/vllm_engine.py": "import vllm"}),
    (rules.libraries, {"hybrid_rl/engines/base.py": "from . import vllm\nfrom .vllm import engine"}),
    (rules.libraries, {"hybrid_rl/controller/ray_backend.py": "import ray"}),
    (rules.libraries, {"hybrid_rl/config/load.py": "import omegaconf"}),
    (rules.libraries, {"hybrid_rl/compat/ray.py": "import ray", "hybrid_rl/compat/vllm.py": "import vllm"}),
    (rules.private_names, {"hybrid_rl/compat/torch.py": "import torch._dynamo\nx = torch._C"}),
    (
        rules.private_names,
        {"hybrid_rl/data/a.py": OWN_PRIVATE},
    ),
    (
        rules.private_names,
        {"hybrid_rl/data/a.py": "torch.ops.aten._to_copy(sys._current_frames(), y._replace())"},
    ),
    (rules.extension, {layers.EXTENSION_HOME: "import torch\ntorch.ops.load_library(1)"}),
    (rules.extension, {"hybrid_rl/resharding/trace.py": "import torch\nx = torch.ops.aten.copy_.default"}),
    (rules.hooks, {layers.HOOKS: "'hybrid_rl.extras'", "hybrid_rl/cli/a.py": "import hybrid_rl.extras.report"}),
    (rules.unmentionables, {"hybrid_rl/run/trainer.py": "array = num_ranks"}),
    (rules.docstrings, {"hybrid_rl/batch.py": "def _f(): pass\n\n\ndef g():\n    'Says.'"}),
    (rules.docstrings, {"hybrid_rl/_x.py": "def f(): 1"}),
    (rules.machine_paths, {"a.md": "https://example.org/home/page and ./home/a/b and /usr/lib/x"}),
    (rules.machine_paths, {".venv/pyvenv.cfg": HOME, "image.bin": "\0" + HOME}),
    (
        rules.architecture_map,
        {layers.MAP: MAP + "\n`run/trainer.py` `setup.py`", "hybrid_rl/run/trainer.py": "", "setup.py": ""},
    ),
    (rules.architecture_map, {layers.MAP: MAP.replace("| x", "| `other`") + "\n## More\n| 1 | `attic` | x |"}),
]


@pytest.mark.parametrize(("rule", "tree", "finding"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_rule_finds(rule: Callable[[Path], list[str]], tree: Tree, finding: str, tmp_path: Path) -> None:
    findings = rule(write(tmp_path, tree))
    assert len(findings) == 1, findings
    assert finding in findings[0]


@pytest.mark.parametrize(("rule", "tree"), KEPT, ids=lambda value: getattr(value, "__name__", None))
def test_rule_lets_pass(rule: Callable[[Path], list[str]], tree: Tree, tmp_path: Path) -> None:
    assert rule(write(tmp_path, tree)) == []


def test_rooms_of_the_core_are_counted(tmp_path: Path) -> None:
    tree = {"run/a.py": "from hybrid_rl.data import b", "data/b.py": "from hybrid_rl.errors import E", "errors.py": ""}
    above = {"extras/report.py": "import hybrid_rl.run.a", "__init__.py": "", "cli.py": "", "batch.py": ""}
    write(tmp_path, {f"hybrid_rl/{path}": text for path, text in (tree | above).items()})
    assert rules.core_rooms(tmp_path) == (4, 3)


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(rules.RULES)
