"""The Python tool: programs that the policy writes are run in a sandbox."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from hybrid_rl.errors import ConfigError, SandboxError
from hybrid_rl.extras.sandbox import MIB, MOST_OUTPUT_BYTES, ProgramResult, Sandbox


class PythonTool(Sandbox):
    """Runs Python programs of the policy in a sandbox; its method `python` is the tool: `tools=[sandbox.python]`. A
    `with` block closes it.

    What a program prints is the answer, with the value of its last line, as in a notebook. What it may do, and the
    limits, are those of `hybrid_rl.extras.sandbox.Sandbox`; nothing is kept from one call to the next.

    output_chars: most characters of an answer; of longer ones the middle is left out. The other arguments are those of
    the sandbox.

    Raises ConfigError for limits that are too small and for packages that are not installed; when first used,
    SandboxError, an AgentError, if the sandbox cannot be made.
    """

    def __init__(
        self,
        timeout_seconds: float = 5.0,
        memory_bytes: int = 512 * MIB,
        output_chars: int = 4000,
        *,
        file_bytes: int = 16 * MIB,
        packages: Sequence[str] = (),
        max_running: int | None = None,
        strict: bool = True,
    ) -> None:
        if not output_chars > 0:
            raise ConfigError(f"PythonTool(output_chars={output_chars!r}): give a number above 0")
        super().__init__(
            "PythonTool",
            timeout_seconds=timeout_seconds,
            memory_bytes=memory_bytes,
            output_bytes=4 * output_chars,  # of the longest characters
            file_bytes=file_bytes,
            packages=packages,
            max_running=max_running,
            strict=strict,
        )
        self.timeout_seconds, self.output_chars = timeout_seconds, output_chars

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one program to the next.

        Args:
            code: The program. Print what you want to see.
        """
        try:
            result = await asyncio.wrap_future(self.start(code))
            is_killed = not result.end and result.code == -signal.SIGKILL
        except SandboxError:
            is_killed = True
        if is_killed:  # from outside; a program leaves nothing behind, so that it may run again
            result = await asyncio.wrap_future(self.start(code))
        return self._text(result)

    def _text(self, result: ProgramResult) -> str:
        """Return a result as the policy gets it."""
        text = result.output
        if len(text) > self.output_chars:
            half = self.output_chars // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
        why = {
            "time": f"ended: it ran for more than {self.timeout_seconds:g} s",
            "output": f"ended: it printed more than {MOST_OUTPUT_BYTES // MIB} MB",
            "cancelled": "ended: cancelled",
            "": f"ended by signal {-result.code}" if result.code < 0 else "",
        }[result.end]
        parts = [text.rstrip("\n"), f"[{why}]" if why else ""]
        return "\n".join(part for part in parts if part) or "(no output)"
