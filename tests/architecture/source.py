"""Reads a tree of Python files: modules, their syntax trees, and what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .layers import PACKAGE, ROOT

ATTRIBUTE_CALLS = frozenset({"getattr", "hasattr", "setattr", "delattr"})
IMPORT_CALLS = frozenset({"import_module", "__import__"})
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """`target` (absolute, dotted) is named by an import on `line`; `name` is what `from target import name` takes."""

    target: str
    name: str | None
    line: int


@dataclass(frozen=True)
class Module:
    """One file: its path relative to the root of the tree, dotted name and text."""

    path: str
    name: str
    text: str
    is_package: bool

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, filename=self.path)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree. Eleven rules look at them, so each file is walked once."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The part of the name directly under the package; ROOT for the package itself."""
        return room_of(self.name)

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports, wherever they stand: in functions, under TYPE_CHECKING, and by `import_module("...")`."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, None, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node.module, node.level)
                yield from (Import(base, alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call) and node.args and _last_name(node.func) in IMPORT_CALLS:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield Import(first.value, None, node.lineno)

    def _absolute(self, module: str | None, level: int) -> str:
        if level == 0:
            return module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - level + (1 if self.is_package else 0)]
        return ".".join([*base, *([module] if module else [])])


def room_of(name: str) -> str:
    """The room of a dotted name inside the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ROOT


@functools.cache  # the text is an argument: a file that has changed is parsed again
def module_of(path: str, text: str) -> Module:
    """The module that a file of this path, relative to the root of the tree, and this text is."""
    parts = path.removesuffix(".py").split("/")
    is_package = parts[-1] == "__init__"
    return Module(path, ".".join(parts[:-1] if is_package else parts), text, is_package)


def read_module(root: Path, path: Path) -> Module:
    """Reads one file of the tree under `root`."""
    return module_of(path.relative_to(root).as_posix(), path.read_text())


def read_modules(root: Path, places: tuple[str, ...] = (PACKAGE,)) -> list[Module]:
    """Reads the Python files of files and folders under `root`; places that do not exist are passed over."""
    files = [
        file
        for place in places
        for file in ([root / place] if (root / place).is_file() else sorted((root / place).rglob("*.py")))
    ]
    return [read_module(root, file) for file in files]


def imported_module(item: Import, names: frozenset[str]) -> str | None:
    """The module of the tree (among `names`) that an import reaches, or None: `from a import b` may mean a.b or a."""
    if item.name is not None and f"{item.target}.{item.name}" in names:
        return f"{item.target}.{item.name}"
    return item.target if item.target in names else None


def defined_names(module: Module) -> Iterator[str]:
    """Names that a file defines: functions, classes, arguments, variables, and attributes that it sets on self."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted_name(node.value) == "self":
            yield node.attr


def private_uses(module: Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each private attribute, keyword, import, and name given to getattr, hasattr, setattr or delattr;
    operators of torch.ops do not count."""
    for node in module.nodes:
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            chain = dotted_name(node)
            found = [] if chain.startswith(("torch.ops.", "aten.")) else [node.attr]
        elif isinstance(node, ast.keyword):
            found = [node.arg or ""]
        elif isinstance(node, ast.Call) and _last_name(node.func) in ATTRIBUTE_CALLS:
            found = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
        yield from ((node.lineno, name) for name in found if is_private(name))
    for item in module.imports:
        names = [*item.target.split("."), item.name or ""]
        if names[0] != PACKAGE:
            yield from ((item.line, name) for name in names if is_private(name))


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def num_code_lines(module: Module) -> int:
    """Lines of a module that hold code: no docstring, no comment, not blank. A limit on all lines would be met by
    explaining less."""
    numbered = enumerate(module.text.splitlines(), start=1)
    lines = {number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")}
    docstrings: set[int] = set()
    for node in module.nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr):  # a string's own lines may be blank, or begin with #
            lines.update(_lines_of(node))
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(_lines_of(node.body[0]))
    return len(lines - docstrings)


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
