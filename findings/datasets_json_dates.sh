#!/bin/bash
# datasets 5.2.0: load_dataset("json") makes timestamps of strings, if all strings of a column look like dates.
#
# JSON has strings, so a column of answers is expected to be one of strings, and features= to say so. The reader infers types
# as for CSV: where every string of a column is an ISO date it is a timestamp, in the content of chat messages too. Seen:
# "2024-01-01" comes back as datetime(2024, 1, 1), whose str() is "2024-01-01 00:00:00", so that no exact match of an answer
# succeeds; "2024-01-01T10:00:00+02:00" as 08:00 without a zone; with one row "unknown" all stay strings. features= comes
# too late: it makes a string of the timestamp. Integers from 2**63 on, and 2**53 + 1 beside a row with 0.5, lose their last
# digits as floats. Way round: Dataset.from_list of rows read by Python's json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cat >"$folder/program.py" <<'P'
import json
import sys
from pathlib import Path

from datasets import Dataset, Features, Value, disable_progress_bars, load_dataset

disable_progress_bars()


def read(*values, **options):
    Path("rows.jsonl").write_text("\n".join(json.dumps({"x": value}) for value in values))
    return list(load_dataset("json", data_files="rows.jsonl", split="train", **options)["x"])


date, zoned = "2024-01-01", "2024-01-01T10:00:00+02:00"
seen = {
    "dates": [str(value) for value in read(date, date)],
    "a date and a word": read(date, "unknown"),
    "a date with a zone": [str(value) for value in read(zoned)],
    "a message": [str(read([{"role": "user", "content": date}])[0][0]["content"])],
    "2**63": read(2**63),
    "2**53 + 1 and 0.5": read(2**53 + 1, 0.5),
    "dates with features": read(date, date, features=Features({"x": Value("string")})),
    "dates, Dataset.from_list": list(Dataset.from_list([{"x": date}, {"x": date}])["x"]),
}
for what, column in seen.items():
    print(f"datasets 5.2.0, {what}: {column}")
midnight = date + " 00:00:00"
expected = [[midnight] * 2, [date, "unknown"], ["2024-01-01 08:00:00"], [midnight], [2.0**63], [2.0**53, 0.5]]
sys.exit(repr([*seen.values()]) != repr([*expected, [midnight] * 2, [date] * 2]))
P
cd "$folder"
HF_HOME="$folder/hf" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" program.py
