#!/bin/bash
# datasets 5.2.0: map() turns the strings that a function returns back into numbers, if all of them look like numbers.
#
# map(lambda row: {"answer": str(row["answer"])}) is expected to give a column of strings, as the function does. A returned
# column that exists already is first tried with its old type, to which strings of digits can be cast; only where that fails
# it gets a new one. Seen: "7" becomes 7 again, "007" too, True becomes 1, and a score of 2 in a column of bools True, while
# one answer "n/a" in the batch, or 3.5, makes all of them what was returned. Code that compares texts then meets ints, or
# not, by the data. Way round: state features=, or return the column under a name that the dataset does not have yet.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cat >"$folder/program.py" <<'P'
import sys
from datasets import Dataset, Features, Value, disable_progress_bars

disable_progress_bars()
answers, passed = Dataset.from_dict({"x": [7, 42]}), Dataset.from_dict({"x": [True, False]})
seen = {
    "ints, str(x)": answers.map(lambda row: {"x": str(row["x"])}),
    "ints, f'{x:03}'": answers.map(lambda row: {"x": f"{row['x']:03}"}),
    "ints, str(x) if x > 7 else 'n/a'": answers.map(lambda row: {"x": str(row["x"]) if row["x"] > 7 else "n/a"}),
    "ints, x / 2": answers.map(lambda row: {"x": row["x"] / 2}),
    "bools, 2 if x else 0": passed.map(lambda row: {"x": 2 if row["x"] else 0}),
    "ints, str(x) with features": answers.map(
        lambda row: {"x": str(row["x"])}, features=Features({"x": Value("string")})
    ),
}
values = [list(dataset["x"]) for dataset in seen.values()]
for what, column in zip(seen, values):
    print(f"datasets 5.2.0, {what}: {column}")
sys.exit(repr(values) != repr([[7, 42], [7, 42], ["n/a", "42"], [3.5, 21.0], [True, False], ["7", "42"]]))
P
cd "$folder"
HF_HOME="$folder/hf" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" program.py
