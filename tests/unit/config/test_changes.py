"""What a resumed run says of its keys."""

from __future__ import annotations

import json

from hybrid_rl.config import load_config, resolve, to_dict
from hybrid_rl.config.changes import MAX_SHOWN, changes


def test_what_differs_is_named_with_both_values() -> None:
    before, after = (
        to_dict(resolve(*load_config({"output_dir": "runs", "max_steps": 5, **keys})))
        for keys in ({"run_name": "a"}, {"run_name": "b", "advantage": "rloo", "learning_rate": 5e-4, "max_steps": 9})
    )
    stored = json.loads(json.dumps(before))
    assert changes(stored, before) == changes({"stops": ["a"]}, {"stops": ("a",)}) == ""
    assert changes(stored, after) == (
        "max_steps 5 -> 9, advantage.estimator grpo -> rloo, optimizer.learning_rate 1e-06 -> 0.0005"
    )


def test_a_long_list_and_long_values_are_cut() -> None:
    before = {f"key{n}": n for n in range(MAX_SHOWN + 3)} | {"gone": 1}
    after = {name: None for name in before if name != "gone"} | {"new": 2}
    assert changes(before, after) == ", ".join(f"key{n} {n} -> null" for n in range(MAX_SHOWN)) + " and 3 more"
    assert changes({"name": "a"}, {"name": "b" * 61}) == f"name a -> {'b' * 57}..."
