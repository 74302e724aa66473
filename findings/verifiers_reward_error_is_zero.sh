#!/bin/bash
# verifiers 0.1.14: a reward function that raises, or returns nothing, has given the reward 0.
#
# Rubric catches every Exception of a reward function, writes it to its logger and goes on with 0.0, also if the function
# returned None. The state of the rollout, of which trainers make rewards, has no error then: a grader whose server is gone
# makes all answers of a batch wrong, and those that were right are trained away. An error of the environment itself is in
# state["error"]. Way round: raise something that is no Exception, or put an error into the state.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check verifiers==0.1.14
cat >"$folder/program.py" <<'P'
import asyncio
import importlib.metadata
import logging
import sys
import verifiers as vf

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def gone(completion, answer):
    raise ConnectionError("the grader is gone")

def forgotten(completion, answer):
    float(completion[-1]["content"] == answer)  # without `return`

def scored(function):
    """Reward and error of a right answer."""
    state = vf.State(prompt=[{"role": "user", "content": "3 + 4"}], completion=[{"role": "assistant", "content": "7"}])
    state.update(answer="7", task="", info={}, timing=None, error=None)
    rubric = vf.Rubric(funcs=[function])
    asyncio.run(rubric.score_rollout(state))
    return state["reward"], state["error"]

logging.disable(logging.CRITICAL)
print(f"verifiers {importlib.metadata.version('verifiers')}: reward and error of a right answer")
results = {function.__name__: scored(function) for function in (right, gone, forgotten)}
for name, result in results.items():
    print(f"  {name:10} {result}")
sys.exit(results != {"right": (1.0, None), "gone": (0.0, None), "forgotten": (0.0, None)})
P
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
