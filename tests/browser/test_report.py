"""The report of runs in a browser: no errors, no requests, curves, and a table that filters and sorts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.extras.report import write_report
from tests.browser.chromium import Page, executable
from tests.support.run_case import HOSTILE, sample, write_lines, write_run

pytestmark = [pytest.mark.browser, pytest.mark.skipif(executable() is None, reason="there is no Chromium")]

READY = "document.documentElement?.dataset.ready === 'true'"


def shown(page: Path, look: Callable[[Page], Awaitable[Any]], **keys: Any) -> Any:
    """Open a report and return what is seen; it must log nothing and ask no network."""

    async def visit() -> Any:
        async with Page(**keys) as browser:
            await browser.open(page, READY)
            found = await look(browser)
            assert browser.problems == []
            assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
            assert len([url for url in browser.requests if url.startswith("file:")]) == 1
            return found

    return asyncio.run(visit())


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "first", 40), write_run(folder / "second", 60, learns=0.03)]
    return write_report(runs, folder / "report.html")


ROWS = (
    "[...document.querySelectorAll('#samples tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
)


async def type_into(page: Page, selector: str, value: str, event: str = "input") -> None:
    await page.run(
        f"(() => {{ const control = document.querySelector('{selector}'); control.value = {value!r}; "
        f"control.dispatchEvent(new Event('{event}')); }})()"
    )


def test_curves_of_both_runs_are_drawn(two_runs: Path) -> None:
    async def look(page: Page) -> Any:
        lines = "[...document.querySelectorAll('[data-chart]')].map((card) => [card.dataset.chart, "
        lines += "card.querySelectorAll('.scatterlayer path.js-line').length])"
        bars = "['phase-bars', 'strip'].map((id) => document.querySelectorAll(`#${id} .bars path`).length)"
        return dict(await page.run(lines)), await page.run(bars)

    lines, (bars, strip) = shown(two_runs, look)
    assert lines["reward of sampled completions"] == 2
    assert lines["evaluation"] == 8  # accuracy and reward of both, and the ends of two intervals
    assert lines["KL to the reference"] == 2
    assert bars == 40 * 8  # of one run: seven parts, the evaluation among them, and what is left
    assert strip > 6


def test_a_run_can_be_hidden_and_curves_smoothed(two_runs: Path) -> None:
    async def look(page: Page) -> Any:
        count = "document.querySelector('[data-chart^=reward]').querySelectorAll('.scatterlayer path.js-line').length"
        path = "document.querySelector('[data-chart^=reward] .scatterlayer path.js-line').getAttribute('d')"
        before = await page.run(path)
        await type_into(page, "#smoothing", "0.9")
        smooth = await page.run(count)
        await type_into(page, "#smoothing", "0")
        await type_into(page, "#axis", "tokens", "change")
        await page.run("document.querySelector('nav input[type=checkbox]').click()")
        return before != await page.run(path), smooth, await page.run(count)

    assert shown(two_runs, look) == (True, 4, 1)


def test_the_table_filters_and_sorts(two_runs: Path) -> None:
    async def look(page: Page) -> Any:
        found: dict[str, Any] = {"all": await page.run("document.querySelector('#count').textContent")}
        await type_into(page, "#search", "12+3=")
        found["searched"] = await page.run(ROWS)
        await type_into(page, "#search", "")
        await type_into(page, "#reward-from", "1")
        found["right"] = await page.run(ROWS)
        await type_into(page, "#reward-from", "")
        await page.run("document.querySelector('th[data-column=step]').click()")
        found["last first"] = await page.run(ROWS)
        await page.run("document.querySelector('th[data-column=step]').click()")
        found["first first"] = await page.run(ROWS)
        await page.run("document.querySelector('#coloured').click()")
        found["coloured"] = await page.run("document.querySelector('#count').textContent")
        return found

    found = shown(two_runs, look)
    assert found["all"].startswith("800 of 800 samples")
    assert [row[3] for row in found["searched"]] == ["12+3=", "12+3="]  # one of each run
    assert {row[5] for row in found["right"]} == {"1"}
    assert found["last first"][0][1] == "60" and found["first first"][0][1] == "1"
    assert found["coloured"].startswith("200 of 800")


def test_tokens_are_coloured(two_runs: Path) -> None:
    async def look(page: Page) -> Any:
        await page.run("document.querySelector('[data-coloring=gap]').click()")
        backgrounds = "[...document.querySelectorAll('.tokens span')].map((span) => span.style.background)"
        gap = await page.run(backgrounds)
        await page.run("document.querySelector('[data-coloring=advantage]').click()")
        return gap, await page.run(backgrounds), await page.run("document.querySelector('.tokens span').title")

    gap, advantage, title = shown(two_runs, look)
    # Gaps of 0, 0.01, ... : the first token has none, the last the most.
    strengths = [float(color.split(",")[-1].strip(" )")) for color in gap]
    assert strengths[0] == 0 and strengths == sorted(strengths) and strengths[-1] == 0.75
    assert len(set(advantage)) == 1
    assert "ln p engine -0.5" in title and "entropy 0.7" in title


def test_what_a_model_writes_is_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    records = []
    for number in range(4):
        record = sample(1, number) | {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "completion": HOSTILE}
        record |= {"rewards": {HOSTILE: 1.0}, "row": {HOSTILE: HOSTILE}, "finish_reason": HOSTILE}
        record["messages"] = [{"role": "assistant", "content": HOSTILE, "tool_calls": [{"name": HOSTILE}]}]
        record["token_values"] = {"text": [HOSTILE, "x"], "logprob": [-1.0, None], "advantage": [1.0, -1.0]}
        records.append(record)
    write_lines(run / "samples.jsonl", records)
    (run / "config.yaml").write_text('{"run_name": "<b id=broken></b>", "</script>": 1}')
    metrics = (run / "metrics.jsonl").read_text().replace('"kl"', '"rewards/<b id=broken></b>/mean"')
    (run / "metrics.jsonl").write_text(metrics)

    async def look(page: Page) -> Any:
        broken = "[document.title, document.querySelectorAll('#broken, main img').length, document.scripts.length]"
        return await page.run(broken), await page.run("document.querySelector('.said').textContent")

    (title, broken, scripts), said = shown(write_report(run), look)
    assert title == "run - hybrid_rl" and broken == 0
    assert scripts == 3  # the data, the page's own, and plotly
    assert said.startswith("</script><script>")


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")

    async def look(page: Page) -> Any:
        return await page.run("document.body.innerText")

    text = shown(write_report(run), look)
    assert "no training step is recorded yet" in text and "No samples are recorded." in text


def test_dark(two_runs: Path) -> None:
    async def look(page: Page) -> Any:
        return await page.run(
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('.xtick text').style.fill]"
        )

    assert shown(two_runs, look, dark=True) == ["rgb(13, 17, 23)", "rgb(230, 237, 243)"]
