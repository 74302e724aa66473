"""The rules of the house. Each takes the root of a tree and returns what is wrong, one line per finding."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from .layers import (
    ABOVE_EXTRAS,
    COMPAT,
    EXTENSION_HOME,
    EXTRAS,
    HOOKS,
    LAYERS,
    LIBRARY_HOMES,
    MACHINE_PATH,
    MAP,
    MAP_HEADING,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MEASURED,
    NOT_OURS,
    ONLY_IMPORTS,
    PACKAGE,
    PRIVATE_NAMES_ALLOWED,
    PRIVATE_NAMES_LEFT,
    ROOT,
    SIBLINGS_ALLOWED,
    TORCH_OPS_ALLOWED,
    UNMENTIONABLE,
)
from .source import (
    Import,
    Module,
    defined_names,
    dotted_name,
    imported_module,
    num_code_lines,
    private_uses,
    read_modules,
    room_of,
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def layers(root: Path) -> list[str]:
    """Imports go down the layers; siblings on one line do not import each other; every room has a line."""
    level = {room: number for number, line in enumerate(LAYERS) for room in line}
    found = []
    for module in read_modules(root):
        if module.room not in level:
            found.append(f"{module.path}: room {module.room!r} is not in the table of layers")
            continue
        for line, target in _rooms_imported(module):
            if target == module.room or (module.room, target) in SIBLINGS_ALLOWED:
                continue
            if target not in level:
                found.append(f"{module.path}:{line}: imports room {target!r}, which is not in the table of layers")
            elif level[target] == level[module.room]:
                found.append(f"{module.path}:{line}: {module.room} imports its sibling {target}")
            elif level[target] > level[module.room]:
                found.append(f"{module.path}:{line}: {module.room} imports {target}, which is above it")
    return found


def core_rooms(root: Path) -> tuple[int, int]:
    """Return the number of rooms of the core, and the length of the longest chain of rooms that import each other."""
    below: dict[str, set[str]] = {}
    for module in read_modules(root):
        if module.room not in ABOVE_EXTRAS:
            below.setdefault(module.room, set()).update(target for _, target in _rooms_imported(module))

    def height(room: str) -> int:
        return 1 + max((height(other) for other in below.get(room, set()) - {room}), default=0)

    return len(below), max(map(height, below), default=0)


def only_imports(root: Path) -> list[str]:
    """Rooms that take tensors and nothing else of ours import nothing else of ours."""
    return [
        f"{module.path}:{line}: {module.room} imports {target}; it may import {', '.join(sorted(allowed))} only"
        for module in read_modules(root)
        if (allowed := ONLY_IMPORTS.get(module.room)) is not None
        for line, target in _rooms_imported(module)
        if target not in allowed
    ]


def cycles(root: Path) -> list[str]:
    """No module reaches itself through imports, those inside functions and under TYPE_CHECKING counted."""
    modules = read_modules(root)
    names = frozenset(module.name for module in modules)
    reached = {
        module.name: {name for item in module.imports if (name := imported_module(item, names)) is not None}
        for module in modules
    }
    closure = {name: _reachable(name, reached) for name in reached}
    groups = {frozenset({other for other in closure[name] if name in closure[other]}) for name in closure}
    return sorted(f"import cycle: {', '.join(sorted(group))}" for group in groups if group)


def subfolders(root: Path) -> list[str]:
    """Folders of a room have an order, too: none reaches itself through others. Only the room's door may import all."""
    modules = read_modules(root)
    names = frozenset(module.name for module in modules)
    folders = {module.name: module.path.rpartition("/")[0] for module in modules}
    reached: dict[str, set[str]] = {}
    for module in modules:
        if module.room == ROOT or module.path == f"{PACKAGE}/{module.room}/__init__.py":
            continue
        folder, targets = folders[module.name], (imported_module(item, names) for item in module.imports)
        inside = {folders[name] for name in targets if name is not None and room_of(name) == module.room}
        reached.setdefault(folder, set()).update(inside - {folder})
    closure = {folder: _reachable(folder, reached) for folder in reached}
    groups = {frozenset({other for other in closure[folder] if folder in closure[other]}) for folder in closure}
    return sorted(f"circle of folders: {', '.join(sorted(group))}" for group in groups if group)


def sizes(root: Path) -> list[str]:
    """Files and functions stay small enough to be read at once."""
    found = []
    for module in read_modules(root, MEASURED):
        num_lines = num_code_lines(module)
        if num_lines > MAX_FILE_LINES:
            found.append(f"{module.path}: {num_lines} lines of code; at most {MAX_FILE_LINES}")
        for node in module.nodes:
            if isinstance(node, FunctionNode):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(
                        f"{module.path}:{node.lineno}: {node.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"
                    )
    return found


def libraries(root: Path) -> list[str]:
    """vllm, ray and omegaconf are each imported in their one place."""
    return [
        f"{module.path}:{item.line}: imports {library}; only {' and '.join(homes)} may"
        for module in read_modules(root, (PACKAGE, "recipes"))
        for item in module.imports
        for library, homes in LIBRARY_HOMES.items()
        if item.target.split(".")[0] == library and not any(_is_at(module.path, home) for home in homes)
    ]


def private_names(root: Path) -> list[str]:
    """Private names of other libraries (attributes, imports, keywords, names given to getattr) are used in compat only.

    An attribute belongs to another library if no file of the tree defines its name.
    """
    modules = read_modules(root)
    ours = {name for module in modules for name in defined_names(module)}
    ours |= PRIVATE_NAMES_ALLOWED | PRIVATE_NAMES_LEFT
    return [
        f"{module.path}:{line}: uses the private name {name}; only {COMPAT} may"
        for module in modules
        if not module.path.startswith(COMPAT)
        for line, name in private_uses(module)
        if name not in ours
    ]


def extension(root: Path) -> list[str]:
    """The compiled extension is touched in one file; elsewhere torch.ops names PyTorch's own operators only."""
    return [
        f"{module.path}:{line}: {what}; only {EXTENSION_HOME} may"
        for module in read_modules(root, (PACKAGE, "recipes", "benchmarks"))
        if module.path != EXTENSION_HOME
        for line, what in _extension_uses(module)
    ]


def hooks(root: Path) -> list[str]:
    """The core names no module of an extra, not even in a string: it asks for what a hook has."""
    pattern = re.compile(rf"\b{PACKAGE}\.{EXTRAS}\b|\b{PACKAGE} import {EXTRAS}\b")
    return [
        f"{module.path}:{number}: names {match.group()}; only {HOOKS} may"
        for module in read_modules(root)
        if module.path != HOOKS and module.room not in ABOVE_EXTRAS
        for number, line in enumerate(module.text.splitlines(), start=1)
        for match in [pattern.search(line)]
        if match
    ]


def unmentionables(root: Path) -> list[str]:
    """Some files do not even name some things."""
    return [
        f"{path}:{number}: names {match.group()!r}"
        for path, pattern in UNMENTIONABLE.items()
        if (root / path).exists()
        for number, line in enumerate((root / path).read_text().splitlines(), start=1)
        for match in [pattern.search(line)]
        if match
    ]


def docstrings(root: Path) -> list[str]:
    """Public functions and classes of public modules say what they are."""
    return [
        f"{module.path}:{node.lineno}: public {node.name} has no docstring"
        for module in read_modules(root)
        if not any(part.startswith("_") and part != "__main__" for part in module.name.split("."))
        for node in module.tree.body
        if isinstance(node, FunctionNode | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not _is_overload(node)
    ]


def machine_paths(root: Path) -> list[str]:
    """No tracked text names a home directory or a path of one machine."""
    found = []
    for file in _text_files(root):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{file.relative_to(root).as_posix()}:{number}: names the path {match.group()!r}"
            for number, line in enumerate(text.splitlines(), start=1)
            for match in MACHINE_PATH.finditer(line)
        ]
    return found


def architecture_map(root: Path) -> list[str]:
    """The map of the architecture shows every room in its layer, and names only files that exist."""
    if not (root / MAP).exists():
        return []
    text = (root / MAP).read_text(encoding="utf-8")
    files = sorted(set(re.findall(r"`([\w/]+\.py)`", text)))
    found = [f"{MAP}: names {file}, which does not exist" for file in files if not _is_file(root, file)]
    shown = _mapped_rooms(text)
    planned = {room: number for number, line in enumerate(LAYERS, start=1) for room in line}
    for room in sorted(shown.keys() | planned.keys()):
        if shown.get(room) != planned.get(room):
            found.append(f"{MAP}: shows room {room!r} in layer {shown.get(room)}, which is in {planned.get(room)}")
    return found


RULES: tuple[Callable[[Path], list[str]], ...] = (
    layers,
    only_imports,
    cycles,
    subfolders,
    sizes,
    libraries,
    private_names,
    extension,
    hooks,
    unmentionables,
    docstrings,
    machine_paths,
    architecture_map,
)


def _is_file(root: Path, path: str) -> bool:
    return (root / path).is_file() or (root / PACKAGE / path).is_file()


def _mapped_rooms(text: str) -> dict[str, int]:
    """Rooms of the map and their layers. A row without a number continues the layer above it."""
    rooms: dict[str, int] = {}
    layer = 0
    for row in text.partition(MAP_HEADING)[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) < 3 or not cells[2].startswith("`"):
            continue
        layer = int(cells[1]) if cells[1] else layer
        rooms |= dict.fromkeys(re.findall(r"`(\w+)`", cells[2]), layer)
    return rooms


def _rooms_imported(module: Module) -> Iterator[tuple[int, str]]:
    for item in module.imports:
        if item.target == PACKAGE and item.name is not None:
            # `from hybrid_rl import x`: a room if there is one of that name, else something of the users' door.
            known = any(item.name in line for line in LAYERS)
            yield item.line, item.name if known else ROOT
        elif item.target == PACKAGE or item.target.startswith(PACKAGE + "."):
            yield item.line, room_of(item.target)


def _reachable(start: str, reached: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(reached[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(reached.get(name, ()))
    return seen


def _is_at(path: str, home: str) -> bool:
    return path.startswith(home) if home.endswith("/") else path == home


def _extension_uses(module: Module) -> Iterator[tuple[int, str]]:
    allowed = {
        id(node.value) for node in module.nodes if isinstance(node, ast.Attribute) and node.attr in TORCH_OPS_ALLOWED
    }
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            if node.attr in ("load_library", "load_inline"):
                yield node.lineno, f"calls {node.attr}"
            elif dotted_name(node) == "torch.ops" and id(node) not in allowed:
                yield node.lineno, "uses torch.ops"
    yield from ((item.line, "imports the extension") for item in module.imports if _names_extension(item))


def _names_extension(item: Import) -> bool:
    full = f"{item.target}.{item.name}" if item.name else item.target
    return full in ("torch.ops", f"{PACKAGE}._native") or full.startswith("torch.utils.cpp_extension")


def _is_overload(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(dotted_name(decorator).split(".")[-1] == "overload" for decorator in decorators)


def _text_files(root: Path) -> list[Path]:
    """Tracked files and new ones that git would track; in a tree without git, all but NOT_OURS."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        files = [root / name for name in listed.split("\0") if name]
    else:
        files = [file for file in root.rglob("*") if not NOT_OURS & set(file.relative_to(root).parts)]
    return sorted(file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192])
