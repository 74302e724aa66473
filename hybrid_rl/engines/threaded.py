"""An engine whose steps run in a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from hybrid_rl.engines.base import FinishedSample, PauseMode, RolloutEngine, RolloutRequest
from hybrid_rl.engines.wrapper import EngineWrapper
from hybrid_rl.errors import EngineStateError
from hybrid_rl.resharding.handoff.base import HandoffReport, Source


class ThreadedEngine(EngineWrapper):
    """Steps another engine in a thread.

    The caller of `step` waits without holding anything: a Ctrl-C or a heartbeat gets through while a pass runs, and so
    does an `abort` of another thread, which the engine sees at its next step. A `step` that its caller broke out of is
    finished and its events come with the next one. All other calls wait for the step under way.

    To be made by the thread that has made the engine: steps run on the GPU and the stream that this thread is on.
    """

    def __init__(self, inner: RolloutEngine) -> None:
        super().__init__(inner)
        self._calls: queue.SimpleQueue[tuple[Callable[[], list[FinishedSample]], Future] | None] = queue.SimpleQueue()
        self._under_way: Future | None = None
        self._aborted: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        # Device, stream and number of threads are those of a thread, not of the process.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, stream, torch.get_num_threads()), name="rollout-engine", daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[], list[FinishedSample]]) -> list[FinishedSample]:
        if not self._thread.is_alive():
            raise EngineStateError("the engine is closed; make a new one")
        if self._under_way is None:
            self._under_way = Future()
            self._calls.put((call, self._under_way))
        result = self._under_way.result  # an interrupt in here leaves the step under way
        try:
            events: list[FinishedSample] = result()
        finally:
            if self._under_way.done():
                self._under_way = None
        return events

    def _settle(self) -> None:
        """Wait for a step that its caller broke out of; its events are handed out by the next one."""
        if self._under_way is not None:
            self._under_way.exception()
        self._apply_aborts()

    def _apply_aborts(self) -> None:
        while not self._aborted.empty():
            self._inner.abort(self._aborted.get())

    def _step(self) -> list[FinishedSample]:
        self._apply_aborts()
        return self._inner.step()

    def step(self) -> list[FinishedSample]:
        """See RolloutEngine. What the thread raises is raised here."""
        return self._run(self._step)

    def break_off(self) -> None:
        """See RolloutEngine."""

        def end() -> list[FinishedSample]:
            self._inner.break_off()
            return []

        if self._under_way is not None:
            self._settle()
            self._under_way = None
        self._run(end)

    def abort(self, ids: Iterable[int]) -> None:
        """See RolloutEngine. Thread-safe."""
        self._aborted.put(list(ids))

    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """See RolloutEngine."""
        self._settle()
        return super().submit(requests, version)

    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine."""
        self._settle()
        super().pause(mode)

    def resume(self) -> None:
        """See RolloutEngine."""
        self._settle()
        super().resume()

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """See RolloutEngine."""
        self._settle()
        return super().update_weights(source, version)

    def sleep(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        self._settle()
        super().sleep(tags)

    def wake(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        self._settle()
        super().wake(tags)

    def close(self) -> None:
        """See RolloutEngine. Ends the thread; nothing happens the second time."""
        if not self._thread.is_alive():
            return
        self._settle()
        self._calls.put(None)
        self._thread.join()
        super().close()


def _serve(
    calls: queue.SimpleQueue[tuple[Callable[[], list[FinishedSample]], Future] | None],
    stream: torch.cuda.Stream | None,
    num_threads: int,
) -> None:
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    torch.set_num_threads(num_threads)
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # a failed step's traceback holds its tensors
