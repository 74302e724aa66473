"""The sandbox of programs that the policy writes: one process that starts them, and what the kernel lets them do."""

from __future__ import annotations

from hybrid_rl.extras.sandbox.connection import ProgramResult
from hybrid_rl.extras.sandbox.sandbox import MIB, MOST_OUTPUT_BYTES, Sandbox, SandboxStrength, sandbox_strength

__all__ = ["MIB", "MOST_OUTPUT_BYTES", "ProgramResult", "Sandbox", "SandboxStrength", "sandbox_strength"]
