"""Which names of torch, vLLM, transformers and Ray a tree of Python files uses, and which of them are not there.

Three kinds of use are looked at. *Imports and chains*: `from vllm.config import ModelConfig`, `dist.new_group`,
resolved by importing. *Known types*: an attribute of something that is annotated with, or made by calling, a class of
a library; looked up in the class. *Unknown types*: an attribute of anything else must be a name that somebody defines:
Python, the tree itself, or the sources of a library that the tree imports. Keywords of calls are looked up in the
signature, or, for compiled functions of torch, in the schemas of the operator of that name.

Names are resolved by importing, and importing vLLM changes the process.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "vllm", "transformers", "ray")
ABSENT = object()
# Classes whose subclasses and users add attributes: what these do not have is looked up like a name of unknown type.
OPEN = ("torch.Tensor", "torch.nn.Module", "torch.optim.AdamW", "transformers.PreTrainedModel")
# Keywords of every factory of tensors, which schemas list under other names or not at all.
FACTORY_KEYWORDS = frozenset({"dtype", "device", "layout", "out", "requires_grad", "pin_memory", "generator"})
# Operators of our own, which exist if the extension was built.
OURS = ("torch.ops.hybrid_rl",)
# Functions of flash-attn, which must be compiled on a machine with CUDA: not there where this runs.
FLASH_ATTENTION = {"_flash_attn_varlen_forward", "_flash_attn_varlen_backward"}
# Methods of what adapters of agents are given, of packages that they do not import: reasoning-gym, tinker-cookbook.
ADAPTED = {"score_answer", "initial_observation", "to_ints", "episode_done", "next_observation", "next_stop_condition"}


@dataclass(frozen=True, order=True)
class Use:
    """`name`, dotted from a library, or `.name` of something unknown; keywords of a call of it."""

    path: str
    line: int
    name: str
    keywords: tuple[str, ...] = ()


@dataclass
class Scope:
    """What names stand for in a file or function: dotted names of modules and objects, and classes of values."""

    objects: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str | None] = field(default_factory=dict)  # None: known to be of no library

    def inner(self) -> Scope:
        """The scope of a function inside."""
        return Scope(dict(self.objects), dict(self.classes))


class Reader(ast.NodeVisitor):
    """Collects the uses of one file."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.uses: list[Use] = []
        self.scope = Scope()
        self.members: dict[str, str] = {}  # of `self`, by the class that is being read
        for node in ast.walk(tree):  # imports inside functions too: a name means one thing in a file
            self._bind_import(node)
        self.visit(tree)

    def _bind_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _of_library(alias.name):
                    self._add(node, alias.name)
                    self.scope.objects[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _of_library(node.module or ""):
            for alias in node.names:
                self._add(node, f"{node.module}.{alias.name}")
                self.scope.objects[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _add(self, node: ast.AST, name: str, keywords: Iterable[str] = ()) -> None:
        self.uses.append(Use(self.path, getattr(node, "lineno", 0), name, tuple(keywords)))

    # ------------------------------------------------------------------------------------------- what things are

    def dotted(self, node: ast.AST | None) -> str | None:
        """The dotted name of a library that an expression means; None for anything else."""
        if isinstance(node, ast.Name):
            return self.scope.objects.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value) or self.type_of(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def type_of(self, node: ast.AST | None) -> str | None:
        """The class of a library that the value of an expression has, if that is plain to see."""
        if isinstance(node, ast.Name):
            return self.scope.classes.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.members.get(node.attr)
        if isinstance(node, ast.Call):
            called = self.dotted(node.func)
            return called if called is not None and isinstance(resolve(called), type) else None
        return None

    def annotated(self, node: ast.AST | None) -> str | None:
        """The class of a library that an annotation names; `X | None` is X."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [side for side in (node.left, node.right) if not _is_none(side)]
            return self.annotated(sides[0]) if len(sides) == 1 else None
        name = self.dotted(node)
        return name if name is not None and isinstance(resolve(name), type) else None

    # --------------------------------------------------------------------------------------------------- reading

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Members of the class are known in all of its methods."""
        outer, self.members = self.members, {}
        for child in ast.walk(node):
            target = child.target if isinstance(child, ast.AnnAssign) else None
            if isinstance(target, ast.Name):
                self._member(target.id, self.annotated(child.annotation))  # type: ignore[union-attr]
            elif isinstance(target, ast.Attribute):
                self._member(target.attr, self.annotated(child.annotation))  # type: ignore[union-attr]
            elif isinstance(child, ast.Assign) and len(child.targets) == 1:
                only = child.targets[0]
                if isinstance(only, ast.Attribute) and isinstance(only.value, ast.Name) and only.value.id == "self":
                    self._member(only.attr, self.type_of(child.value))
        self.generic_visit(node)
        self.members = outer

    def _member(self, name: str, cls: str | None) -> None:
        if cls is not None:
            self.members[name] = cls

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Arguments hide what has their name outside."""
        for outside in (*node.decorator_list, node.returns, *node.args.defaults, *node.args.kw_defaults):
            if outside is not None:
                self.visit(outside)
        outer, self.scope = self.scope, self.scope.inner()
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            self.scope.objects.pop(argument.arg, None)
            self.scope.classes[argument.arg] = self.annotated(argument.annotation)
            if argument.annotation is not None:
                self.visit(argument.annotation)
        for rest in (node.args.vararg, node.args.kwarg):
            if rest is not None:
                self.scope.objects.pop(rest.arg, None)
                self.scope.classes[rest.arg] = None
        for statement in node.body:
            self.visit(statement)
        self.scope = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """A name with an annotation is of that class."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._assign(node.target.id, self.annotated(node.annotation))

    def visit_Assign(self, node: ast.Assign) -> None:
        """A name is of the class that makes its value, until it is assigned again."""
        self.generic_visit(node)
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    whole = name is target  # and no part of what is unpacked
                    self._assign(
                        name.id, self.type_of(node.value) if whole else None, self.dotted(node.value) if whole else None
                    )

    def visit_For(self, node: ast.For) -> None:
        """What is looped over is of no known class."""
        for name in ast.walk(node.target):
            if isinstance(name, ast.Name):
                self._assign(name.id, None)
        self.generic_visit(node)

    def _assign(self, name: str, cls: str | None, means: str | None = None) -> None:
        self.scope.objects.pop(name, None)
        self.scope.classes[name] = cls
        if cls is None and means is not None:
            self.scope.objects[name] = means

    def visit_Call(self, node: ast.Call) -> None:
        """A call with keywords, also one that functools.partial puts off."""
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        called = self.dotted(node.func)
        if called is None and node.args and _last(node.func) == "partial":
            called = self.dotted(node.args[0])
        if called is not None and keywords:
            self._add(node, called, keywords)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A use of a name of a library, or of something unknown."""
        name = self.dotted(node)
        if name is not None:
            self._add(node, name)
        elif isinstance(node.ctx, ast.Load) and not _is_dunder(node.attr):
            self._add(node, f".{node.attr}")
        self.generic_visit(node)


# ------------------------------------------------------------------------------------------------- what is there


@functools.cache
def resolve(name: str) -> Any:
    """The object of a dotted name: modules are imported as far as they go, the rest are attributes. ABSENT if it is not
    there; None if that cannot be told, since it would be an attribute of a value."""
    parts = name.split(".")
    value: Any = ABSENT
    for length in range(1, len(parts) + 1):
        module = _module(".".join(parts[:length]))
        if module is not None and (
            length == 1 or not hasattr(value, parts[length - 1]) or isinstance(value, types.ModuleType)
        ):
            value = module
            continue
        if value is ABSENT or value is None:
            return value
        owner, last = value, parts[length - 1]
        if not hasattr(owner, last):
            if isinstance(owner, types.ModuleType) and _found(".".join(parts[:length])):
                return None  # a module that needs what is not installed
            return _declared(owner, last)
        value = getattr(owner, last)
        if isinstance(owner, type) and not callable(value):
            return None  # a property or field, of which only instances have a value
    return value


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    if not _of_library(name):
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _declared(owner: Any, name: str) -> Any:
    """None for an attribute that only instances have: one that a class of the object declares or assigns to self."""
    if isinstance(owner, types.ModuleType):
        return ABSENT
    classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for cls in classes:
        if name in getattr(cls, "__annotations__", {}) or name in getattr(cls, "__slots__", ()):
            return None
        if f"self.{name}" in _source(cls):
            return None
    return ABSENT


@functools.cache
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def missing_keywords(name: str, keywords: Iterable[str]) -> list[str]:
    """Those of the keywords that the callable of this dotted name does not take."""
    called = resolve(name)
    if called is ABSENT or called is None:
        return []
    try:
        parameters = inspect.signature(called).parameters.values()
    except (ValueError, TypeError):
        known = _schema_arguments(name.rpartition(".")[2])
        return [keyword for keyword in keywords if known and keyword not in known | FACTORY_KEYWORDS]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return [keyword for keyword in keywords if keyword not in names]


def _schema_arguments(operator: str) -> set[str]:
    import torch

    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    return {argument.name for schema in schemas for argument in schema.arguments}


# ---------------------------------------------------------------------------------- names of things of unknown type


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """What the files themselves define: functions, classes, fields and whatever is assigned to an attribute."""
    names: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def exported_names(root: Path) -> set[str]:
    """Functions that the project's own libraries declare for ctypes."""
    return {
        name for file in (root / "csrc").glob("*.h") for name in re.findall(r"\bhybrid_rl_\w+(?=\()", file.read_text())
    }


def python_names(modules: Iterable[str]) -> set[str]:
    """Attributes of Python's own types, of these modules, and of the classes and modules in them (os.path)."""
    names: set[str] = set()
    for module in (builtins, types, *(importlib.import_module(name) for name in modules)):
        for name, value in vars(module).items():
            names.add(name)
            if isinstance(value, type | types.ModuleType):
                names.update(dir(value), dir(type(value)))  # types of ctypes have methods of their own kind: in_dll
    return names


def defined_in_sources(names: set[str], modules: Iterable[str]) -> set[str]:
    """Those of the names that the sources of these modules define: a def, a class, a field, an assignment to self, a
    module inside."""
    left = set(names)
    for path in _sources(modules):
        if not left:
            break
        left.discard(path.stem)
        data = path.read_bytes()
        # Splitting a file into words costs as much as looking for some dozens of them.
        words = None if len(left) < 40 else set(re.findall(rb"\w+", data))
        there = {name for name in left if name.encode() in (data if words is None else words)}
        if there:
            choice = "|".join(sorted(there))
            pattern = rf"(?:\bdef |\bclass |\bself\.|^[ \t]+)({choice})\b(?=[ \t]*(?:\(|:|=[^=]|,\s))"
            left.difference_update(re.findall(pattern, data.decode(errors="replace"), re.MULTILINE))
    return names - left


def _sources(modules: Iterable[str]) -> Iterator[Path]:
    # The largest last: most names are found before.
    for name in sorted(modules, key=lambda name: (name in LIBRARIES, name)):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from sorted([*Path(folder).rglob("*.py"), *Path(folder).rglob("*.pyi")])
        if spec and spec.origin and spec.origin.endswith(".py") and not spec.submodule_search_locations:
            yield Path(spec.origin)


def missing(root: Path, places: Iterable[str]) -> Iterator[tuple[Use, str]]:
    """What files and folders under `root` use and this environment does not have, with what is missing."""
    files = [
        file
        for place in places
        for file in ([root / place] if (root / place).is_file() else sorted((root / place).rglob("*.py")))
    ]
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in files}
    uses = sorted({use for path, tree in trees.items() for use in Reader(path, tree).uses})
    imported = {path: _imported(tree) for path, tree in trees.items()}
    everything = set().union(*imported.values())
    installed = {name for name in everything if importlib.util.find_spec(name) is not None}
    # Of what is not installed nothing is known, nor of the values that come from it.
    closed = {path for path, names in imported.items() if names <= installed}
    unknown = {use.name[1:] for use in uses if use.name.startswith(".") and use.path in closed}
    unknown -= own_names(trees.values()) | exported_names(root) | FLASH_ATTENTION | ADAPTED
    unknown -= python_names(name for name in installed if name in sys.stdlib_module_names)
    unknown -= defined_in_sources(unknown, installed - {"hybrid_rl"})
    for use in uses:
        if use.name.startswith("."):
            if use.name[1:] in unknown and use.path in closed:
                yield use, use.name[1:]
        elif use.name.split(".")[0] in installed and not use.name.startswith(OURS):
            if resolve(use.name) is ABSENT and not use.name.startswith(OPEN):
                yield use, use.name
            for keyword in missing_keywords(use.name, use.keywords):
                yield use, f"{use.name}({keyword}=)"


def _imported(tree: ast.Module) -> set[str]:
    """The packages and modules of Python that a file imports, by their first names, also by import_module("...")."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Call) and node.args and _last(node.func) == "import_module":
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value)
    return {name.split(".")[0] for name in names}


def _of_library(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
