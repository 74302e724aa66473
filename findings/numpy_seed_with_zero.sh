#!/bin/bash
# numpy 2.4.6: default_rng([seed, 0]) is the stream of default_rng(seed), and [a, b] that of a + 2**32 * b.
#
# A list as seed is expected to be another seed than a number, as is common for workers: default_rng([seed, worker]).
# SeedSequence cuts numbers into words of 32 bits, appends them and fills the rest with zeros, so that neither the ends of
# the numbers nor zeros at the end count. Seen: the stream of worker 0 is the one of the main process, draw by draw: noise
# and data that are thought of as independent are the same. Way round: the worker first, [worker, seed], as worker 0 then
# shifts the seed by a word, or SeedSequence(seed).spawn(workers).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6
cat >"$folder/program.py" <<'P'
import sys
import numpy as np

def same(one, other):
    return bool((np.random.default_rng(one).random(1000) == np.random.default_rng(other).random(1000)).all())

seen = {
    "main 7, worker [7, 0]": same(7, [7, 0]),
    "main 7, worker [7, 1]": same(7, [7, 1]),
    "main 7, worker [7, 0, 0, 0]": same(7, [7, 0, 0, 0]),
    "[7, 3] and 7 + 3 * 2**32": same([7, 3], 7 + 3 * 2**32),
    "main 7, worker [0, 7]": same(7, [0, 7]),
}
for pair, is_same in seen.items():
    print(f"numpy {np.__version__}, {pair}: {'the same' if is_same else 'different'} numbers")
sys.exit(list(seen.values()) != [True, False, True, True, False])
P
cd "$folder"
"$folder/venv/bin/python" program.py
