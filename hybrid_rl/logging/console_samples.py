"""Samples on the console: who said what, the answer, the rewards, and the advantage."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hybrid_rl.batch.messages import call_text
from hybrid_rl.logging.lines import number

ANSWERS = ("answer", "solution", "ground_truth", "target", "label")  # columns that tell what would have been right
WIDE = 60  # cells from which on a role stands beside its text, not above it
LABEL = 12
DEFAULT_WIDTH = 100
MAX_WIDTH = 120  # longer lines are hard to read
HEAD, TAIL = 1200, 600  # characters that are shown of a longer text


def completion_block(sample: Mapping[str, Any], width: int | None) -> Text:
    """Return a sample as lines for a screen of this many cells (None = any number). sample: its record, as in
    samples.jsonl."""
    cells = min(DEFAULT_WIDTH if width is None else width, MAX_WIDTH)
    console = Console(width=cells, file=io.StringIO(), force_jupyter=False)
    lines = [_wrapped(console, _title(sample), cells, "bold")]
    for label, text in parts_of(sample):
        style = "" if label in ("assistant", "completion") else "dim"
        if cells >= WIDE:
            body = _wrapped(console, shortened(text), cells - LABEL, style).split("\n", allow_blank=True)
            for place, line in enumerate(body):
                head = f"{label:<{LABEL - 1}} " if place == 0 and len(label) < LABEL else " " * LABEL
                if place == 0 and len(label) >= LABEL:
                    lines.append(Text(label, "cyan"))
                lines.append(Text.assemble((head, "cyan"), line))
        else:
            lines += [Text(label, "cyan"), _wrapped(console, shortened(text), cells, style)]
    return Text("\n").join(lines)


def _wrapped(console: Console, text: str, width: int, style: str) -> Text:
    wrapped = Text(text, style).wrap(console, max(1, width), overflow="fold", tab_size=4)
    for line in wrapped:
        line.rstrip()
    return Text("\n").join(wrapped)


def _title(sample: Mapping[str, Any]) -> str:
    """Return the first line of a sample: its place in the step, its rewards, its advantage, and how it ended."""
    words = [f"step {sample['step']}, prompt {sample['group']}, sample {sample['trajectory']}"]
    if sample.get("turn"):
        words[0] += f", turn {sample['turn']}"
    reward = sample.get("reward")
    total = "masked" if reward is None else number("{:.3f}", reward)
    by_function = sample.get("rewards") or {}
    named = ", ".join(f"{name} {'none' if v is None else number('{:.3g}', v)}" for name, v in by_function.items())
    words.append(f"reward {total}" + (f" ({named})" if len(by_function) > 1 else ""))
    if sample.get("advantage") is not None:
        words.append(f"advantage {sample['advantage']:+.2f}")
    if sample.get("finish_reason") not in (None, "stop"):
        words.append(f"ended by {sample['finish_reason']}")
    return "-- " + "  ".join(words)


def parts_of(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield who said what in a sample, prompt first, and at the end the answer that the dataset has, if it has one."""
    prompt = sample["prompt"]
    is_chat = isinstance(prompt, list)
    if is_chat:
        yield from map(message_parts, prompt)
    elif prompt is not None:
        yield "prompt", str(prompt)
    if sample.get("messages"):
        yield from map(message_parts, sample["messages"])
    elif len(tokens := sample.get("tokens") or ()) > 1:
        yield from ((str(span["origin"]), str(span["text"])) for span in tokens)
    else:
        yield "assistant" if is_chat else "completion", str(sample["completion"])
    row = sample.get("row") or {}
    answer = next((name for name in ANSWERS if row.get(name) is not None), None)
    if answer is not None:
        yield answer, str(row[answer])
    if sample.get("error"):
        yield "error", str(sample["error"])


def message_parts(message: Any) -> tuple[str, str]:
    """Return role and text of a chat message; each tool call as a call of a function."""
    if not isinstance(message, Mapping):
        return "message", str(message)
    content = message.get("content") or ""
    if not isinstance(content, str):
        blocks = [block if isinstance(block, Mapping) else {"text": block} for block in content]
        content = "".join(str(block.get("text", f"[{block.get('type', 'block')}]")) for block in blocks)
    made = [call_text(call) for call in message.get("tool_calls") or ()]
    return str(message.get("role", "message")), "\n".join(part for part in (content.strip(), *made) if part)


def shortened(text: str) -> str:
    """Return beginning and end of a long text, and how much is left out between them."""
    if len(text) <= HEAD + TAIL + 100:
        return text
    return f"{text[:HEAD]}\n... ({len(text) - HEAD - TAIL:,} characters; samples.jsonl has them) ...\n{text[-TAIL:]}"
