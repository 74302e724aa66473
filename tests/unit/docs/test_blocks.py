"""README and docs: their Python runs, and their commands exist and take the arguments shown.

A tiny policy stands in for the named model, for one step with small batches; num_ranks and engine are checked as keys
and left out, because other tests run them. The blocks of a page are one program.
"""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hybrid_rl
from hybrid_rl.config import load_config
from hybrid_rl.config.load import leaf_names
from tests.support.agents.callers import build_policy
from tests.unit.docs.blocks import BLOCKS, PAGES, ROOT, Block

PYTHON = {page: [b.code for b in BLOCKS if (b.page, b.language, b.reason) == (page, "python", None)] for page in PAGES}
# docs/adding_an_algorithm.md has a test of its own, which gives back what the page registers.
PROGRAMS = [page for page, found in PYTHON.items() if found and page != "docs/adding_an_algorithm.md"]
COMMANDS = [block for block in BLOCKS if block.language == "sh" and block.reason is None]
# Blocks that carry a mark, and the reason that it gives.
NOT_RUN = {
    ("docs/agents.md", "needs gymnasium"),
}
LANGUAGES = {"python", "sh", "text", "yaml", "json", "{toctree}", "{eval-rst}", "{include}"}
CALLS = [("multiply", {"a": 12, "b": 34}), *(("guess", {"number": number}) for number in (4, 8, 12))]
MOST = {"max_steps": 2, "num_generations": 4, "prompts_per_step": 1, "log_completions": 0}
ELSEWHERE = ("num_ranks", "tensor_parallel_size", "device")
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHER_PROGRAMS = {"git", "cd", "export", "source", "uv", "docker", "sbatch", "grep", "less", "echo", "cat", "twine"}
OTHER_MODULES = {"venv", "pytest", "zipfile"}


def test_blocks_that_are_not_run_are_these() -> None:
    assert {(block.page, block.reason) for block in BLOCKS if block.reason} == NOT_RUN


@pytest.mark.parametrize("page", PAGES)
def test_no_block_escapes_by_its_language(page: str) -> None:
    assert {block.language for block in BLOCKS if block.page == page} <= LANGUAGES
    assert PAGES[page].count("```") == 2 * sum(block.page == page for block in BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any("openai" in code for code in PYTHON[page]):
        pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    policy, tokenizer = build_policy(CALLS, favour={"4": 1.0, "7": 1.0})
    original = hybrid_rl.Trainer
    made = []

    def small(model: Any = None, *arguments: Any, **keys: Any) -> hybrid_rl.Trainer:
        config, _ = load_config(None, {n: v for n, v in keys.items() if n in leaf_names()})
        if config.rollout.engine == "vllm":
            keys.pop("engine")
        keys = {name: value for name, value in keys.items() if name not in ELSEWHERE}
        most = {n: min(m, keys.get(n, m)) for n, m in MOST.items()} | {"max_prompt_length": 200}
        most["max_steps"] = min(keys["max_steps"], 3) if "resume" in keys or "run_name" in keys else most["max_steps"]
        if not Path(str(model)).is_dir():
            keys["tokenizer"], model = tokenizer, policy
        if "algorithm" in keys:
            most.pop("num_generations")  # a preset's own
        keys = {"max_completion_length": 8} | keys | {"warmup_steps": 0} | most
        made.append(original(model, *arguments, **keys))
        return made[-1]

    monkeypatch.setattr(hybrid_rl, "Trainer", small)
    program: dict[str, Any] = {"__name__": "example"}
    for code in PYTHON[page]:
        exec(compile(code, str(tmp_path / page), "exec", dont_inherit=True), program)
    assert any(trainer.global_step for trainer in made) or not any("Trainer(" in code for code in PYTHON[page])
    for trainer in made:
        trainer.close()


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"{block.page}-{block.code.split(chr(10))[0][:30]}")
def test_commands_exist(block: Block) -> None:
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for is_pipe, command in itertools.groupby(words, lambda word: word == "|"):
            parts = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), command))
            if parts and not is_pipe:
                check_command(parts)


def check_command(words: list[str]) -> None:
    """Fail unless a command could be started as it stands."""
    program, *rest = words
    program = Path(program).name
    if program == "make":
        for word in rest:
            assert "=" in word or re.search(rf"^{word}:", MAKEFILE, re.MULTILINE), f"make has no target {word}"
    elif program == "hybrid-rl":
        check_hybrid_rl(rest)
    elif program in ("python", "python3"):
        script = rest[0] if rest[0] != "-m" else rest[1].replace(".", "/") + ".py"
        if rest[0] != "-m" or rest[1] not in OTHER_MODULES:
            assert (ROOT / script).is_file(), f"{script} does not exist"
        if script.startswith("recipes/"):
            check_keys(rest[1:])
    elif program == "pip":
        for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
            assert set(extras.split(",")) <= EXTRAS.keys()
        for flag, value in zip(rest, rest[1:], strict=False):
            assert flag != "-c" or (ROOT / value).is_file()
    else:
        assert program in OTHER_PROGRAMS, (
            f"{' '.join(words)}: parse it here, or mark the block: <!-- not run: REASON -->"
        )


def check_hybrid_rl(words: list[str]) -> None:
    import typer

    from hybrid_rl.cli import app

    group: Any = typer.main.get_command(app)
    name, *rest = words
    if name.startswith("-"):
        assert name in {"-h", "--help", *(option for parameter in group.params for option in parameter.opts)}
        return
    assert name in group.commands, f"hybrid-rl has no command {name}"
    group.commands[name].make_context(name, [word for word in rest if word != "--help"])
    check_keys([word for word in rest if "=" in word and not word.startswith("-")])


def check_keys(words: list[str]) -> None:
    load_config(arguments=[word for word in words if not word.startswith(("reward=", "config="))])
