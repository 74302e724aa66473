"""The choice of samples, and the page itself."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from hybrid_rl.extras.report import sample_choice as samples
from hybrid_rl.extras.report import write_report
from hybrid_rl.extras.report.run_files import Line
from hybrid_rl.extras.report.write import report_data
from tests.support.run_case import HOSTILE, sample, write_lines, write_run


def lines_of(steps: dict[int, int], size: int = 100) -> list[Line]:
    """Return places of samples: so many by step; the last of each step has values of its tokens."""
    return [
        Line(Path("x"), 1000 * step + number, size, step, number == count - 1)
        for step, count in steps.items()
        for number in range(count)
    ]


def test_every_step_has_its_share_of_the_samples() -> None:
    chosen = samples.chosen(lines_of({1: 2, 2: 10, 3: 10}), 10)
    assert [line.start for line in chosen] == [1000, 1001, 2000, 2001, 2002, 2009, 3000, 3001, 3002, 3009]


def test_of_more_steps_than_samples_some_are_chosen() -> None:
    chosen = samples.chosen(lines_of(dict.fromkeys(range(100), 3)), 10)
    assert [line.step for line in chosen] == list(range(0, 100, 10)) and all(line.has_token_values for line in chosen)
    assert samples.chosen([], 10) == []


def test_huge_samples_are_cut_and_thinned(tmp_path: Path, monkeypatch: Any) -> None:
    run = write_run(tmp_path / "run", 2)
    texts = {"prompt": [{"role": "user", "content": "p" * 7000}] * 70, "completion": "c" * 100_000}
    values = {"text": ["x"] * 5000, "logprob": [0.0] * 5000}
    records = [
        sample(1, number) | texts | {"row": {"deep": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}}}
        for number in range(20)
    ]
    records[0]["token_values"] = values
    write_lines(run / "samples.jsonl", records)
    monkeypatch.setattr(samples, "MAX_BYTES", 500_000)
    data = report_data([run])
    assert len(data["samples"]) == 500_000 * 20 // (20 * samples.MAX_SAMPLE)
    assert len(json.dumps(data["samples"])) < 600_000
    assert data["notes"] == [
        f"run: {len(data['samples'])} of 20 samples are on this page, from 1 of 1 steps; all are in {run}"
    ]
    first = data["samples"][0]
    assert len(first["prompt"]) == samples.MAX_ITEMS + 1
    assert first["prompt"][0]["content"].endswith("ppp\n[... 1,000 characters more]")
    assert first["completion"] == "c" * samples.MAX_TEXT + "\n[... 94,000 characters more]"
    assert len(first["token_values"]["text"]) == samples.MAX_TOKENS and first["token_values"]["num_tokens"] == 5000


def test_the_page_is_bounded(tmp_path: Path) -> None:
    """50,000 samples of 300 bytes are 15 MB; the page has 3,000 of them, and says so."""
    run = write_run(tmp_path / "run", 1)
    line = json.dumps(sample(1, 1)) + "\n"
    with open(run / "samples.jsonl", "w") as file:
        file.writelines(line.replace('"step": 1', f'"step": {step}') * 100 for step in range(1, 501))
    path = write_report(run)
    assert path == run / "report.html" and path.stat().st_size < 2_500_000
    data = data_of(path)
    assert len(data["samples"]) == 3000 and {row["step"] for row in data["samples"]} == set(range(1, 501))
    assert data["notes"][0].startswith("run: 3,000 of 50,000 samples are on this page, from 500 of 500 steps")


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">([^<]*)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


def test_nothing_that_was_said_is_html(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2)
    write_lines(run / "samples.jsonl", [sample(1, 0) | {"completion": HOSTILE, "prompt": HOSTILE}])
    page = write_report(run, tmp_path / "<b>.html").read_text(encoding="utf-8")
    assert HOSTILE[:20] not in page and page.count("</script>") == 3
    assert data_of(tmp_path / "<b>.html")["samples"][0]["completion"] == HOSTILE


def test_the_title_is_escaped_and_no_address_is_loaded(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "<i>run", 1), tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<title>&lt;i&gt;run - hybrid_rl</title>" in page
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "default-src 'none'" in page


def test_samples_of_ranks_and_of_evaluations_are_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    (run / "samples.jsonl").unlink()
    write_lines(run / "samples-rank0.jsonl", [sample(1, 0)])
    write_lines(run / "samples-rank1.jsonl", [sample(1, 4)])
    write_lines(run / "eval-samples.jsonl", [sample(0, 0) | {"set": "gsm8k"}])
    rows = report_data([run])["samples"]
    assert [(row["kind"], row["group"], row.get("set")) for row in rows] == [
        ("train", 0, None),
        ("train", 1, None),
        ("eval", 0, "gsm8k"),
    ]
