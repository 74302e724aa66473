"""The report of runs: one page of HTML made from their folders."""
