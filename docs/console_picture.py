"""Draws docs/pictures/console.svg, a small run in 80 columns: `python docs/console_picture.py`."""

from __future__ import annotations

import io
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from hybrid_rl import Trainer  # noqa: E402
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer  # noqa: E402
from hybrid_rl.logging.lines import bar_line  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "console.svg"
WIDTH = 80
STEPS = 20


class Recording:
    """A screen that keeps what it shows. It has live lines only where `bar` draws one."""

    is_live, is_plain, takes_all, width = True, False, False, WIDTH

    def __init__(self) -> None:
        self.console = Console(record=True, file=io.StringIO(), force_terminal=True, width=WIDTH, highlight=False)

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        """Keep lines."""
        self.console.print(text)

    def watch(self, lines: object) -> None:
        """Show no live lines: a picture does not move."""

    def end(self) -> None:
        """Nothing is to be removed."""


def rows(number: int) -> list[dict[str, str]]:
    """Return sums of two numbers."""
    source = random.Random(0)
    pairs = [(source.randrange(10, 99), source.randrange(10, 99)) for _ in range(number)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward the share of digits."""
    return [sum(char.isdigit() for char in text) / max(len(text), 1) for text in completions]


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward the answer."""
    return [float(text == solution) for text, solution in zip(completions, answer, strict=True)]


def main() -> None:
    """Run, and write the picture."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    settings: dict[str, Any] = {"max_steps": STEPS, "num_generations": 8, "prompts_per_step": 8, "eval_steps": 5}
    settings |= {"max_completion_length": 8, "learning_rate": 4e-4, "dtype": "float32", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        data = (rows(200), rows(20))
        model = build_model(tokenizer, 0)
        settings |= {"output_dir": folder, "run_name": "digits"}
        trainer = Trainer(model, [right, digits], *data, tokenizer=tokenizer, reward_weights=[1.0, 0.5], **settings)
        screen = Recording()
        display = trainer._log.display
        display._screen = screen  # type: ignore[assignment]
        show_summary = display.summary

        def summary(path: Path) -> None:
            """Show the live line as it was, then the end, under a folder's usual name."""
            screen.say(
                "bar", bar_line(STEPS, STEPS, display._ended - display._begun, 0.0, WIDTH - 4, is_plain=False), {}
            )
            show_summary(Path("runs") / "digits")

        display.summary = summary  # type: ignore[method-assign]
        trainer.fit()
        trainer.close()
        PICTURE.write_text(screen.console.export_svg(title="python train.py") + "\n")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
