"""Trackers with faults, which must not stop or slow a run, nor lose any of it; and the real ones, if they are there."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.errors import ConfigError, HybridRLError
from hybrid_rl.extras.trackers import trackers
from hybrid_rl.extras.trackers.tracker_kinds import KINDS, Measured, TrackedRun, flat, table_of
from hybrid_rl.extras.trackers.trackers import MAX_TABLES, Trackers, check_trackers, read_state, upload
from hybrid_rl.logging.run_folder import JsonLines

CONFIG = {"seed": 1, "optimizer": {"learning_rate": 0.1, "betas": [0.9, 0.99]}, "log_completions": 2}


class Service:
    """What a tracker's server has; a fault is raised by, or waits in, every call while it is set."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.tables: list[int] = []
        self.runs: list[TrackedRun] = []
        self.calls = self.num_closed = 0
        self.fault: Callable[[], object] | None = None
        self.fault_at_close: Callable[[], object] | None = None
        self.at: dict[int, set[float]] = {}

    def connect(self, run: TrackedRun) -> Service:
        self._work()
        self.runs.append(run)
        self.identity = run.identity or f"run-{len(self.runs)}"
        return self

    def log(self, steps: Sequence[Measured]) -> None:
        for one in steps:
            self.at.setdefault(one.step, set()).add(one.at)
        self._work()
        self.steps += [one.step for one in steps]

    def table(self, step: int, samples: Sequence[Any]) -> None:
        self._work()
        self.tables.append(step)

    def close(self) -> None:
        self.num_closed += 1
        if self.fault_at_close is not None:
            self.fault_at_close()

    def _work(self) -> None:
        self.calls += 1
        if self.fault is not None:
            self.fault()


class Run:
    """A run folder to which steps are written as RunLog does."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.file = folder, JsonLines(folder / "metrics.jsonl")
        (folder / "config.yaml").write_text(json.dumps(CONFIG))
        self.trackers = Trackers(["mlflow"], folder, CONFIG, first_step)
        self.longest = 0.0

    def step(self, step: int) -> None:
        self.file.write([{"step": step, "reward": 0.5}])
        start = time.perf_counter()
        self.trackers.table(step, [{"step": step}])
        self.trackers.log(step)
        self.longest = max(self.longest, time.perf_counter() - start)

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.step(step)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service()
    monkeypatch.setitem(KINDS, "mlflow", made.connect)
    install(monkeypatch, "mlflow")
    for name, seconds in (("FIRST_DELAY", 0.01), ("LONGEST_DELAY", 0.02), ("CLOSE_SECONDS", 0.3)):
        monkeypatch.setattr(trackers, name, seconds)
    yield made
    made.fault = None


def wait_for(is_there: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_everything_arrives_once_and_in_order(service: Service, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.steps(*range(26))
    run.trackers.close()
    run.trackers.close()
    assert service.steps == list(range(26)) and service.tables == list(range(26)) and service.num_closed == 1
    assert service.runs[0].config == CONFIG and service.runs[0].identity is None
    assert read_state(run.folder) == {"mlflow": {"id": "run-1", "step": 25}}


def raising() -> None:
    raise ConnectionError("refused")


def exiting() -> None:
    sys.exit("no key")


@pytest.mark.parametrize("fault", [raising, exiting])
def test_a_tracker_that_is_down_is_caught_up(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Callable[[], None]
) -> None:
    service.fault = fault
    run = Run(tmp_path / "run")
    run.steps(*range(5))
    wait_for(lambda: service.calls >= 3)
    service.fault = None
    wait_for(lambda: service.steps == list(range(5)))
    wait_for(lambda: service.tables == list(range(5)) and "answers again" in caplog.text)
    service.fault, before = fault, service.calls
    run.steps(5, 6)
    wait_for(lambda: service.calls >= before + 3)
    service.fault = None
    run.step(7)
    run.trackers.close()
    assert service.steps == list(range(8)) and service.tables == list(range(8))
    assert all(len(moments) == 1 for moments in service.at.values())  # sent again with the same time
    texts = [record.message for record in caplog.records]
    assert sum("mlflow cannot be reached" in text for text in texts) == 2
    assert sum("mlflow answers again" in text for text in texts) >= 1 and "upload" not in caplog.text


def test_a_tracker_that_hangs_costs_nothing_and_is_said_at_the_end(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SLOW_SECONDS", 0.02)
    release = threading.Event()
    run = Run(tmp_path / "run")
    run.steps(0, 1)
    wait_for(lambda: service.steps == [0, 1])
    wait_for(lambda: service.tables == [0, 1])
    service.fault, before = lambda: release.wait(30), service.calls
    run.step(2)
    wait_for(lambda: service.calls > before)
    time.sleep(0.03)
    run.steps(*range(3, 400))
    assert run.longest < 1 and "it has not answered for 0 s" in caplog.text
    start = time.monotonic()
    run.trackers.close()
    assert 0.2 < time.monotonic() - start < 5
    told = "mlflow has not received what came after step 1 (it has not answered for 0 s). Nothing is lost: the run "
    assert told + f"folder has it, and `hybrid-rl upload {run.folder} mlflow` sends it" in caplog.text
    service.fault = None
    release.set()
    wait_for(lambda: len(service.steps) >= 3)
    state = read_state(run.folder)["mlflow"]
    again = service.steps.copy()
    assert upload(run.folder, "mlflow") == 399 - state["step"]
    assert sorted({*again, *service.steps}) == list(range(400)) and service.runs[-1].identity == "run-1"


def test_a_slow_tracker_is_waited_for_while_it_moves(service: Service, tmp_path: Path) -> None:
    service.fault = lambda: time.sleep(0.05)
    run = Run(tmp_path / "run")
    run.steps(*range(30))
    run.trackers.close()
    assert service.steps == list(range(30))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tracker_that_dies_or_hangs_at_its_close(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    release = threading.Event()
    service.fault_at_close = (lambda: release.wait(30)) if hangs else raising
    run = Run(tmp_path / "run")
    run.step(0)
    run.trackers.close()
    release.set()
    died = "mlflow has every step, but did not end well: ConnectionError: refused"
    assert ("mlflow has not received the end of the run" if hangs else died) in caplog.text


def test_memory_is_bounded_and_lost_samples_are_said(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.fault = raising
    run = Run(tmp_path / "run")
    run.steps(*range(MAX_TABLES + 8))
    wait_for(lambda: service.calls >= 2)
    service.fault = None
    run.trackers.close()
    assert service.steps == list(range(MAX_TABLES + 8)) and service.tables == list(range(8, MAX_TABLES + 8))
    assert "mlflow has not received samples of 8 steps" in caplog.text


def test_a_table_that_is_never_taken_does_not_block_the_rest(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def table(step: int, samples: Sequence[Any]) -> None:
        if step == 1:
            raise ValueError("broken file")
        taken.append(step)

    service.table = table  # type: ignore[method-assign]
    run = Run(tmp_path / "run")
    run.steps(0, 1, 2)
    wait_for(lambda: taken == [0, 2])
    run.steps(3)
    run.trackers.close()
    assert service.steps == [0, 1, 2, 3] and taken == [0, 2, 3]
    assert "mlflow has not received samples of 1 step" in caplog.text


def test_a_resumed_run_goes_on_in_the_trackers_run(service: Service, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.steps(*range(5))
    run.trackers.close()
    # Resumed after step 2: steps 3 and 4 are made again, which RunFolder has dropped from the file.
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:3]))
    later = Run(run.folder, first_step=2)
    later.steps(3, 4)
    later.trackers.close()
    assert service.steps == [0, 1, 2, 3, 4, 3, 4] and service.runs[1].identity == "run-1"
    assert service.runs[1].first_step == 2


def test_a_record_that_is_being_written_waits(service: Service, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.step(0)
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "rew')
        file.flush()
        run.trackers.log(0)
        wait_for(lambda: service.steps == [0])
        file.write('ard": 2.0}\n')
    run.trackers.log(1)
    run.trackers.close()
    assert service.steps == [0, 1]


# ------------------------------------------------------------------------------------------------------- upload


def test_upload_sends_everything_with_samples(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    JsonLines(folder / "metrics.jsonl").write({"step": step, "reward": 0.5} for step in range(25))
    for rank in range(2):
        records = ({"step": s, "trajectory": 2 * t + rank} for s in range(1, 25) for t in range(3))
        JsonLines(folder / f"samples-rank{rank}.jsonl").write(records)
    seen: list[list[int]] = []
    service.table = lambda step, samples: seen.append([step, *(s["trajectory"] for s in samples)])  # type: ignore[method-assign]
    assert upload(folder, "mlflow") == 25 and service.steps == list(range(25))
    assert seen == [[step, 0, 1] for step in range(1, 25)]
    assert upload(folder, "mlflow") == 0 and upload(folder, "mlflow", again=True) == 25


def test_upload_that_fails_goes_on_where_it_was(service: Service, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    JsonLines(folder / "metrics.jsonl").write({"step": step} for step in range(25))

    def fails_late() -> None:
        if service.calls == 3:
            raise ConnectionError("gone")

    service.fault = fails_late
    with pytest.raises(HybridRLError, match=r"mlflow took 10 steps and then failed: ConnectionError: gone; call it"):
        upload(folder, "mlflow")
    service.fault = None
    assert upload(folder, "mlflow") == 15 and service.steps == list(range(25))


def test_upload_of_what_is_no_run_or_damaged(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'comet' is not a tracker; use one of tensorboard"):
        upload(tmp_path, "comet")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl; name the folder of a run"):
        upload(tmp_path, "mlflow")
    JsonLines(tmp_path / "metrics.jsonl").write([{"step": 0, "reward": 0.5}])
    damaged = {"[1]": "list", "[": "cannot be read", "tracker_arguments: [2]": r"tracker_arguments: \[2\]"}
    for content, what in damaged.items():
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ConfigError, match=f"config.yaml.*{what}.*restore it, or delete it"):
            upload(tmp_path, "mlflow")
    (tmp_path / "config.yaml").write_text("log_completions: many")
    for state in ('{"mlflow": "s"}', '{"mlflow": {"step": "s"}}', "[]"):
        (tmp_path / "trackers.json").write_text(state)
        assert upload(tmp_path, "mlflow") == 1


@pytest.mark.parametrize("keys", [{"report_to": None}, {"report_to": ["mlflow"], "tracker_arguments": None}])
def test_upload_takes_the_arguments_of_the_run(service: Service, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Also those of a run that names trackers and arguments apart."""
    JsonLines(tmp_path / "metrics.jsonl").write([{"step": 0, "reward": 0.5}])
    arguments = {"mlflow": {"experiment_name": "sums"}}
    config = {name: arguments if value is None else value for name, value in keys.items()}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert upload(tmp_path, "mlflow") == 1
    assert service.runs[0].arguments == arguments["mlflow"]


def test_what_a_tracker_never_got(service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    service.fault = interrupted
    run = Run(tmp_path / "run")
    run.step(0)
    run.trackers.close()
    assert "mlflow has received nothing of this run (KeyboardInterrupt). Nothing is lost" in caplog.text


# ------------------------------------------------------------------------------------------------- checks, tables


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KINDS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"report_to=\['{name}'\]: .*pip install {name}"):
            check_trackers([name])


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of this name for the length of a test."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comet": {"project": "p"}}, "report_to.comet: it is not a tracker; use one of tensorboard, wandb"),
        ({"mlflow": "uri"}, "report_to.mlflow='uri' must be a mapping"),
        ({"mlflow": {"uri": "x"}}, "report_to.mlflow.uri: mlflow has no such argument; it takes tracking_uri"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "mlflow")
    with pytest.raises(ConfigError, match=message):
        check_trackers(arguments)
    check_trackers({"mlflow": {"tracking_uri": "x", "tags": {}}, "none": None})


def test_wandb_without_a_login_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [ValueError("API key must have 40 characters")]

    def login(*, prompt: bool = True) -> bool:
        assert not prompt
        if faults:
            raise faults.pop()
        return False

    def init(project: str | None = None, mode: str | None = None, config: Any = None) -> None: ...

    install(monkeypatch, "wandb", login=login, init=init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="ValueError: API key must have 40 characters; run `wandb login`"):
        check_trackers(["wandb"])
    with pytest.raises(ConfigError, match="run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"):
        check_trackers(["wandb"])
    check_trackers({"wandb": {"mode": "offline", "project": "p"}})
    with pytest.raises(ConfigError, match=r"report_to\.wandb\.config: wandb has no such argument"):
        check_trackers({"wandb": {"config": {}}})
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])


@pytest.mark.parametrize("fault", [RuntimeError("broken\nbuild"), SystemExit(4), ImportError("no lib")])
def test_a_tracker_whose_import_fails(fault: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trackio.py").write_text("raise Fault\n")
    monkeypatch.setattr("builtins.Fault", fault, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match=f"report_to=trackio: importing it fails with {type(fault).__name__}: .*"):
        check_trackers({"trackio": {"project": "p"}})


class Recorder(SimpleNamespace):
    """Writes down what is called on it."""

    def __getattr__(self, name: str) -> Any:
        def record(*arguments: Any, **options: Any) -> Recorder:
            self.calls.append((name, arguments, options))
            return self

        return record


def test_what_wandb_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb = Recorder(calls=[], id="abc")
    install(monkeypatch, "wandb", init=wandb.init, Table=lambda columns, data: (columns[0], data[0][0]))
    run = TrackedRun(tmp_path / "run", {"seed": 1}, {"group": "g"}, "old", 4)
    tracker = KINDS["wandb"](run)
    tracker.log([Measured(5, {"reward": 0.5}, 0.0)])
    tracker.table(5, [{"step": 5, "prompt": "p", "completion": "c"}])
    tracker.close()
    (_, _, options), *rest = wandb.calls
    assert options == {
        "name": "run",
        "dir": str(tmp_path / "run"),
        "group": "g",
        "project": "hybrid_rl",
        "id": "old",
        "resume": "allow",
        "config": {"seed": 1},
        "reinit": "create_new",
    }
    logged = [arguments for name, arguments, _ in rest if name == "log"]
    assert logged == [({"reward": 0.5, "step": 5},), ({"completions": ("step", 5), "step": 5},)]
    assert rest[-1][0] == "finish" and tracker.identity == "abc"


def test_tables_of_samples() -> None:
    chat = {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4", "reward": 1.0, "row": {"solution": 4}}
    other = {"prompt": "p", "completion": "c", "reward": None, "rewards": {"right": 0.0}, "advantage": -0.5}
    columns, rows = table_of(3, [chat, {**other, "finish_reason": "length"}])
    named = ["step", "prompt", "completion", "answer", "reward", "reward right", "advantage", "finish_reason"]
    assert columns == named
    assert rows[0] == [3, "user: 2+2=", "4", "4", 1.0, None, None, None]
    assert rows[1] == [3, "p", "c", None, None, 0.0, -0.5, "length"]
    assert flat(CONFIG)["optimizer.learning_rate"] == 0.1 and flat(CONFIG)["optimizer.betas"] == "[0.9, 0.99]"


def test_no_trackers(tmp_path: Path) -> None:
    made = Trackers(["none"], tmp_path, {})
    made.log(1)
    made.table(1, [])
    made.close()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- the real ones


def real_run(folder: Path, name: str, arguments: dict[str, Any]) -> None:
    """Send 12 steps to a real tracker."""
    folder.mkdir()
    made = Trackers({name: arguments}, folder, {**CONFIG, "report_to": {name: arguments}})
    file = JsonLines(folder / "metrics.jsonl")
    for step in range(12):
        file.write([{"step": step, "reward": step / 10, "eval/pass@1": 0.5}])
        made.table(step, [{"step": step, "prompt": "2+2=", "completion": "4", "reward": 1.0, "rewards": {"r": None}}])
        made.log(step)
    made.close()
    assert read_state(folder)[name]["step"] == 11


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    real_run(tmp_path / "run", "tensorboard", {})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward")] == [
        (step, step / 10) for step in range(12)
    ]
    assert len(events.Tensors("completions/text_summary")) == 10  # it keeps a sample of 10


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 60.0)
    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    monkeypatch.chdir(tmp_path)
    real_run(tmp_path / "run", "mlflow", {"tracking_uri": uri, "experiment_name": "e", "tags": {"a": "b"}})
    client = mlflow.MlflowClient(uri)
    [found] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert found.info.run_name == "run" and found.info.status == "FINISHED" and found.data.tags["a"] == "b"
    assert found.data.params["optimizer.learning_rate"] == "0.1"
    history = client.get_metric_history(found.info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(step, step / 10) for step in range(12)]
    assert "eval/pass_1" in found.data.metrics
    assert len(client.list_artifacts(found.info.run_id, "completions")) == 12


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 60.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    real_run(tmp_path / "run", "wandb", {"project": "p", "group": "g", "tags": ["t"]})
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    import sqlite3

    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 60.0)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "db", raising=False)
    real_run(tmp_path / "run", "trackio", {"project": "p", "auto_log_cpu": False})
    [database] = [*(tmp_path / "db").glob("*.db")] or [*Path(os.environ.get("TRACKIO_DIR", "/nowhere")).glob("p.db")]
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step, id").fetchall()
    assert {step for step, _ in rows} == set(range(12)) and any("completions" in str(metrics) for _, metrics in rows)
