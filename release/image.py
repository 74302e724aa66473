"""Runs a Dockerfile without Docker, in a clean folder: `python release/image.py docker/Dockerfile.cpu`.

For machines that have no Docker or cannot pull base images. It proves that what is copied exists and is not ignored,
that the commands succeed one after the other, and that the entry point starts; it does not prove that the base image
has what they need. A new virtual environment takes the place of the image's Python. FROM, EXPOSE, LABEL and USER are
not carried out. RUN instructions that change the system (apt-get, useradd) are listed, and carried out only with
--system.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_THE_SYSTEM = ("apt-get", "useradd")
PASSED = ("FROM", "EXPOSE", "LABEL", "USER")
KEPT = (
    "HOME",
    "LANG",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "PIP_CERT",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
)


class Failed(Exception):
    """An instruction that cannot be carried out; its text says which and why."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, the rest with line ends removed, and the line on which it begins."""

    word: str
    rest: str
    line: int


def main() -> int:
    """Carry out a Dockerfile; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--system", action="store_true", help="carry out apt-get and useradd, on this machine")
    parser.add_argument(
        "--command", action="append", default=[], help="start the entry point with these too, after CMD"
    )
    asked = parser.parse_args()
    arguments = dict(pair.split("=", 1) for pair in asked.build_arg)
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        try:
            found = list(instructions(asked.dockerfile.read_text()))
            make(Path(folder), ROOT, found, arguments, asked.command, with_system=asked.system)
        except Failed as failure:
            print(f"{asked.dockerfile}, {failure}", file=sys.stderr)
            return 1
    return 0


def make(
    folder: Path,
    context: Path,
    found: list[Instruction],
    arguments: dict[str, str],
    commands: list[str],
    *,
    with_system: bool = False,
) -> None:
    """Carry out every instruction of a Dockerfile with this context, each stage (FROM) in a folder of its own, then the
    entry point of the last one with the arguments of CMD, and with each of `commands`. Raises Failed."""
    stages: dict[str, Path] = {}
    image: Image | None = None
    for instruction in found:
        print(f"{instruction.line}: {instruction.word} {instruction.rest}", flush=True)
        if instruction.word == "FROM":
            image = Image(folder / str(len(stages)), context, arguments, with_system, stages)
            _, _, name = instruction.rest.partition(" AS ")
            stages[name or str(len(stages))] = image.root
        elif image is None:
            raise Failed(f"line {instruction.line}: {instruction.word} before FROM is not known here")
        else:
            image.carry_out(instruction)
    if image is None:
        raise Failed("it has no FROM")
    image.start(commands)


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. Comments and line ends inside of one are removed."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or not (line.strip() or begun):
            continue
        first = first if begun else number
        begun += line.strip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            word, _, rest = begun.partition(" ")
            yield Instruction(word.upper(), rest.strip(), first)
            begun = ""


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether a .dockerignore keeps a path of the context out of it: the last pattern that fits decides."""
    ignored = False
    parents = [path, *(parent.as_posix() for parent in Path(path).parents if parent != Path())]
    for pattern in patterns:
        kept = pattern.startswith("!")
        form = pattern.removeprefix("!").strip("/")
        # One star stays within a folder, two do not.
        name = re.compile(
            fnmatch.translate(form).replace(".*", "[^/]*") if "**" not in form else fnmatch.translate(form)
        )
        if any(name.match(part) for part in parents):
            ignored = not kept
    return ignored


def ignore_patterns(context: Path) -> list[str]:
    """Return the patterns of a context's .dockerignore."""
    lines = [line.strip() for line in (context / ".dockerignore").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class Image:
    """A folder that fills as a stage of an image would. arguments: values for ARG. with_system: run what changes the
    system. stages: the folders of those before, by name."""

    def __init__(
        self, folder: Path, context: Path, arguments: dict[str, str], with_system: bool, stages: dict[str, Path]
    ) -> None:
        self.stages = dict(stages)
        self.root, self.context, self.arguments, self.with_system = folder / "root", context, arguments, with_system
        self.python = folder / "venv"
        self.patterns = ignore_patterns(context)
        self.variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        self.variables["PATH"] = f"{self.python / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.workdir = self.root
        self.entry: list[str] = []
        self.command: list[str] = []
        self.root.mkdir(parents=True)
        venv.create(self.python, with_pip=True)

    def start(self, commands: list[str]) -> None:
        """Run the entry point with the arguments of CMD, and with each of `commands`. Raises Failed."""
        for arguments in (self.command, *map(shlex.split, commands)):
            words = [*self.entry, *arguments]
            print(f"entry point: {shlex.join(words)}", flush=True)
            self.call(words, "the entry point")

    def carry_out(self, instruction: Instruction) -> None:
        """Carry out one instruction. Raises Failed."""
        where = f"line {instruction.line}"
        match instruction.word:
            case "RUN" if instruction.rest.startswith(OF_THE_SYSTEM) and not self.with_system:
                print("   not carried out: it changes the system (--system)", flush=True)
            case "RUN":
                self.call(["/bin/sh", "-ec", instruction.rest], where)
            case "COPY":
                self.copy(shlex.split(instruction.rest), where)
            case "WORKDIR":
                self.workdir = self.root / instruction.rest.strip("/")
                self.workdir.mkdir(parents=True, exist_ok=True)
            case "ENV":
                self.variables |= dict(pair.split("=", 1) for pair in shlex.split(instruction.rest))
            case "ARG":
                name, _, value = instruction.rest.partition("=")
                self.variables[name] = self.arguments.get(name, value.strip('"'))
            case "ENTRYPOINT":
                self.entry = json.loads(instruction.rest)
            case "CMD":
                self.command = json.loads(instruction.rest)
            case word if word not in PASSED:
                raise Failed(f"{where}: {word} is not known here; teach it to release/image.py")

    def copy(self, words: list[str], where: str) -> None:
        """Copy files of the context, each pattern of which must find one that .dockerignore lets in, or of the stage
        that --from names."""
        *sources, target = [word for word in words if not word.startswith("--")]
        place = (self.root if target.startswith("/") else self.workdir) / target.strip("/")
        stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        if stage is not None:
            self._copy_from(stage, sources, place, where)
            return
        for source in sources:
            names = [path.relative_to(self.context).as_posix() for path in sorted(self.context.glob(source))]
            names = [name for name in names if not is_ignored(name, self.patterns)]
            if not names:
                raise Failed(f"{where}: COPY {source} finds nothing that .dockerignore lets into the build")
            for name in names:
                path = self.context / name
                if path.is_dir():
                    shutil.copytree(path, place, dirs_exist_ok=True, ignore=self.ignored)
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)

    def _copy_from(self, stage: str, folders: list[str], place: Path, where: str) -> None:
        if stage not in self.stages:
            raise Failed(f"{where}: there is no stage {stage} before")
        for folder in folders:
            path = self.stages[stage] / folder.strip("/")
            if not path.is_dir():
                raise Failed(f"{where}: stage {stage} has no folder {folder}")
            shutil.copytree(path, place, dirs_exist_ok=True)

    def ignored(self, folder: str, names: list[str]) -> list[str]:
        """Return those of a folder's files that .dockerignore keeps out; for shutil.copytree."""
        within = Path(folder).relative_to(self.context)
        return [name for name in names if is_ignored((within / name).as_posix(), self.patterns)]

    def call(self, words: list[str], where: str) -> None:
        """Run a command in the folder. Raises Failed with its status."""
        program = shutil.which(words[0], path=self.variables["PATH"])
        if program is None:
            raise Failed(f"{where}: there is no {words[0]}")
        status = subprocess.run([program, *words[1:]], cwd=self.workdir, env=self.variables, check=False).returncode
        if status:
            raise Failed(f"{where}: ended with status {status}: {shlex.join(words)}")


if __name__ == "__main__":
    sys.exit(main())
