"""The report of runs: one page of HTML made from their folders."""

from hybrid_rl.extras.report.write import write_report

__all__ = ["write_report"]
