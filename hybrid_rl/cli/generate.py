"""`hybrid-rl generate`: completions of a checkpoint, or a chat with it."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hybrid_rl.cli.key_values import Settings, take
from hybrid_rl.errors import ConfigError, DataError, HybridRLError

if TYPE_CHECKING:
    from hybrid_rl import Generation, Trainer
    from hybrid_rl.config import TrainerConfig

DEFAULT_LENGTH = 512
KEY = re.compile(r"[A-Za-z_][\w.]*")
CHAT_HELP = """/system TEXT   a system prompt, from the next message on; without TEXT none
/set NAME VALUE   temperature, top_p, top_k, min_p, repetition_penalty, seed or max_completion_length
/again         another answer to the last message
/reset         forget the conversation
/quit          end (so does Ctrl-D)"""


def generate(
    model: Annotated[str, typer.Argument(metavar="FOLDER", help="A checkpoint, a run's folder, or any model's name.")],
    settings: Settings = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Complete this; may be repeated.")] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Complete each line of a text file, or each row of a data file.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text itself, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per completion.")] = False,
    num_generations: Annotated[int, typer.Option(metavar="N", help="Completions per prompt.")] = 1,
    max_completion_length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Longest completion; by default that of a checkpoint's run, else 512."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 is how training samples.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what is there already.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same completions.")] = 0,
) -> None:
    """Chat with a checkpoint, or let it complete prompts.

    It generates as training does: with the same engine, chat template and tokens. On a terminal, without --prompt and
    --file, it is a chat, which remembers what was said; piped text is one prompt. A model without a chat template gets
    the bare text.

    Examples:
      hybrid-rl generate runs/first                     chat with the newest checkpoint
      hybrid-rl generate runs/first/checkpoint-40 --prompt "What is 3*7?"
      hybrid-rl generate MODEL --file prompts.txt --temperature 0 --json
      hybrid-rl generate MODEL --prompt "37+48=" --raw --num-generations 4
      hybrid-rl generate MODEL device=cpu dtype=float32 attention=sdpa
    """
    folder = checkpoint_of(model)
    sampling: dict[str, Any] = {
        "num_generations": num_generations,
        "max_completion_length": length_of(folder) if max_completion_length is None else max_completion_length,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    settings = taken(settings or [], sampling)
    prompts = prompts_of(prompt or [], file)
    is_chat = prompts is None and sys.stdin.isatty()
    if prompts is None and not is_chat:
        prompts = [sys.stdin.read().strip("\n")]
    with opened(folder, settings, sampling["max_completion_length"], prompts, system, raw=raw) as trainer:
        if not raw and trainer.tokenizer.chat_template is None:
            raw = True
            print("the model has no chat template, so it completes the bare text", file=sys.stderr)
        if raw and system is not None:
            raise ConfigError("--system needs a chat template; put the text into the prompt instead")
        if is_chat:
            Chat(trainer, sampling, raw=raw, system=system).run()
            return
        asked = [as_prompt(text_or_messages, system, raw=raw) for text_or_messages in prompts or ()]
        print_generations(trainer.generate(asked, **sampling), as_json=as_json)


def taken(settings: Sequence[str], sampling: dict[str, Any]) -> list[str]:
    """Move options that are written like keys (temperature=0) into `sampling`; return the other settings. Raises
    ConfigError for what is no setting: a prompt, most likely."""
    rest = []
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals or not KEY.fullmatch(name):
            raise ConfigError(f"{word!r} is not of the form KEY=VALUE; a prompt is given as --prompt {word!r}")
        if name not in sampling:
            rest.append(word)
            continue
        try:
            sampling[name] = type(sampling[name])(value)
        except ValueError as error:
            raise ConfigError(f"{word}: {value!r} is not of type {type(sampling[name]).__name__}") from error
    return rest


def length_of(model: str) -> int:
    """Return max_completion_length of the run that wrote a checkpoint; DEFAULT_LENGTH for other models."""
    from hybrid_rl.checkpoint.reading import STATE_FILE, read_state

    if not (Path(model) / STATE_FILE).is_file():
        return DEFAULT_LENGTH
    config = read_state(Path(model), ("config",))["config"]
    return int(config.get("rollout", {}).get("max_completion_length", DEFAULT_LENGTH))


def prompts_of(texts: Sequence[str], file: Path | None) -> list[Any] | None:
    """Return the prompts that were given, texts or lists of messages; None if there are none. Raises DataError for a
    file that cannot be read."""
    if not texts and file is None:
        return None
    prompts: list[Any] = list(texts)
    if file is not None:
        try:
            lines = [line for line in file.read_text().splitlines() if line.strip()]
            prompts += [json.loads(line)["prompt"] if file.suffix == ".jsonl" else line for line in lines]
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"--file {file} cannot be read ({type(error).__name__}: {error}); give a text file with a prompt per "
                "line, or a .jsonl file with a column prompt"
            ) from error
        if not lines:
            raise DataError(f"--file {file} is empty; write a prompt per line")
    return prompts


def as_prompt(said: Any, system: str | None, *, raw: bool) -> Any:
    """Return a text as a conversation of one message, unless it is to be completed as it is. Conversations stay."""
    if raw or not isinstance(said, str):
        return said
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": said}]


def checkpoint_of(model: str) -> str:
    """Return the newest checkpoint of a run's folder; other folders, and names, as they are."""
    folder = Path(model)
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return model
    from hybrid_rl.checkpoint.finding import checkpoints_of

    checkpoints = checkpoints_of(folder)
    if not checkpoints:
        raise ConfigError(
            f"{model} has no model (no config.json), no adapter and no checkpoint; save_steps=N makes a run write "
            "checkpoints"
        )
    print(f"checkpoint: {checkpoints[max(checkpoints)]}", file=sys.stderr)
    return str(checkpoints[max(checkpoints)])


@contextlib.contextmanager
def opened(
    model: str,
    settings: Sequence[str],
    max_completion_length: int,
    given: Sequence[Any] | None,
    system: str | None,
    *,
    raw: bool,
) -> Iterator[Trainer]:
    """Load a model with the engine that training would use, and without leaving a run folder behind. given, system,
    raw: what will be completed, as `rows_of` takes it."""
    from hybrid_rl import Trainer
    from hybrid_rl.config import load_config
    from hybrid_rl.run.checks import no_reward

    _, arguments = take("model.path", settings)
    logger = logging.getLogger("hybrid_rl")
    level = logger.level
    with contextlib.ExitStack() as closing:
        closing.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)  # what a run would be warned of
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-rl-generate-"))
        own = {"model": {"path": model}, "output_dir": folder, "max_completion_length": max_completion_length}
        config, _ = load_config(None, {**own, "max_steps": 1}, arguments)
        with Console(stderr=True).status(f"loading {model}"):
            rows = rows_of(config, given, system, raw=raw)
            trainer = Trainer(reward_funcs=no_reward, train_dataset=rows, config=config)
        yield closing.enter_context(trainer)


def rows_of(config: TrainerConfig, given: Sequence[Any] | None, system: str | None, *, raw: bool) -> Any:
    """Return the training data of a Trainer that only generates. vLLM is built for the longest prompt in it, so these
    are the prompts that will be completed; of a chat, where they are unknown (None), it is a stream, for which vLLM
    gets room for max_prompt_length or all that the model takes."""
    unused = [{"prompt": "-"}]
    if config.rollout.engine != "vllm":
        return unused
    if given is None:
        return lambda: iter(unused)
    if not raw:
        from hybrid_rl.run.inputs import tokenizer_of

        raw = tokenizer_of(str(config.model.path), config).chat_template is None
    return [{"prompt": as_prompt(text_or_messages, system, raw=raw)} for text_or_messages in given]


def print_generations(found: Sequence[Generation], *, as_json: bool) -> None:
    """Print completions: as they are if there is but one, else under their prompts."""
    for number, generation in enumerate(found):
        if as_json:
            line = {
                "prompt": generation.prompt,
                "completion": generation.completion,
                "finish_reason": generation.finish_reason,
            }
            print(json.dumps(line | {"num_tokens": len(generation.completion_ids)}, ensure_ascii=False))
        elif len(found) == 1:
            print(generation.completion)
        else:
            is_new = number == 0 or found[number - 1].prompt != generation.prompt
            last = generation.prompt if isinstance(generation.prompt, str) else generation.prompt[-1]["content"]
            print(f"{'=== ' + last + chr(10) if is_new else ''}--- {generation.finish_reason}\n{generation.completion}")


@dataclass
class Chat:
    """A conversation on a terminal. raw: each message is a text to complete, and nothing is remembered."""

    trainer: Trainer
    sampling: dict[str, Any]
    raw: bool = False
    system: str | None = None
    said: list[dict[str, str]] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def run(self) -> None:
        """Talk until the user ends it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and earlier lines in input()
        notice = "each text is completed by itself" if self.raw else "it remembers what was said"
        self.console.print(f"{notice}; /help lists commands, Ctrl-D ends\n", style="dim")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self.take(line)

    def take(self, line: str) -> None:
        """Obey a command, or answer."""
        command, _, rest = line.partition(" ")
        if command == "/help":
            self.console.print(CHAT_HELP, markup=False)
        elif command == "/reset":
            self.said.clear()
        elif command == "/system":
            self.system = rest.strip() or None
        elif command == "/set":
            self._set(*rest.partition(" ")[::2])
        elif command == "/again":
            self._again()
        elif command.startswith("/") and " " not in command and command[1:].isalpha():
            self.console.print(f"{command} is no command; /help lists them", style="red", markup=False)
        else:
            self.said.append({"role": "user", "content": line})
            self._answer()

    def _set(self, name: str, value: str) -> None:
        try:
            if name not in self.sampling or name == "num_generations":
                raise ConfigError(f"there is no {name!r} to set; /help lists the names")
            self.sampling[name] = type(self.sampling[name])(value)
        except (ValueError, ConfigError) as error:
            self.console.print(str(error), style="red", markup=False)

    def _again(self) -> None:
        if self.said and self.said[-1]["role"] == "assistant":
            self.said.pop()
        if not self.said:
            self.console.print("nothing was said yet", style="red")
            return
        self.sampling["seed"] += 1
        self._answer()

    def _answer(self) -> None:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked: Any = self.said[-1]["content"] if self.raw else [*opening, *self.said]
        try:
            with self.console.status("generating (Ctrl-C stops it)"):
                (answer,) = self.trainer.generate([asked], **self.sampling | {"num_generations": 1})
        except KeyboardInterrupt:
            self.console.print("stopped", style="dim")
            self.said.pop()
            return
        except HybridRLError as error:  # such as a conversation that has become too long
            self.console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
            self.said.pop()
            return
        self.console.print(answer.completion, markup=False)
        if answer.finish_reason == "length":
            self.console.print("(cut off at max_completion_length)", style="dim")
        self.console.print()
        if self.raw:
            self.said.clear()
        else:
            self.said.append({"role": "assistant", "content": answer.completion})
