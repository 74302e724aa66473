#!/bin/bash
# reasoning-gym 0.1.25: a dataset with a seed holds other questions in another process, and one holds others when asked again.
#
# create_dataset(name, size=, seed=) is expected to fix all questions: index and seed stand for the text, in resumed runs, in
# every worker and in evaluations that are compared. Some tasks choose from sets of strings, whose order Python's random hash
# seed decides in each process; list_functions draws some questions from a generator that the seed does not set. Seen: of the
# tasks below chain_sum alone is the same in processes with different hash seeds, and items of list_functions are others at
# the second look in one process. Way round: write the questions and answers down once; PYTHONHASHSEED helps with the sets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check reasoning-gym==0.1.25
cat >"$folder/program.py" <<'P'
import hashlib
import reasoning_gym

for name in ("chain_sum", "isomorphic_strings", "polynomial_multiplication", "ransom_note"):
    items = reasoning_gym.create_dataset(name, size=20, seed=3)
    text = repr([(items[index]["question"], items[index]["answer"]) for index in range(20)])
    print(name, hashlib.sha256(text.encode()).hexdigest()[:12])
P
cat >"$folder/again.py" <<'P'
import sys
import reasoning_gym

changed = {}
for name in ("chain_sum", "list_functions"):
    items = reasoning_gym.create_dataset(name, size=100, seed=3)
    looks = [[items[index]["question"] for index in range(100)] for _ in range(2)]
    changed[name] = sum(one != other for one, other in zip(*looks))
    print(f"reasoning-gym 0.1.25, {name}: {changed[name]} of 100 questions are others at the second look")
sys.exit(changed["chain_sum"] != 0 or changed["list_functions"] == 0)
P
cd "$folder"
status=0
PYTHONHASHSEED=1 "$folder/venv/bin/python" program.py >one
PYTHONHASHSEED=2 "$folder/venv/bin/python" program.py >two
while read -r name first second; do
    [[ $first == "$second" ]] && how=same || how=different
    echo "reasoning-gym 0.1.25, $name in two processes: $how questions"
    [[ $name == chain_sum ]] && expected=same || expected=different
    [[ $how == "$expected" ]] || status=1
done < <(join one two)
[[ $(wc -l <one) == 4 ]] || status=1
"$folder/venv/bin/python" again.py || status=1
exit $status
