"""A thread in which an engine steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from hybrid_rl.errors import EngineStateError

Call = Callable[[], None]


class StepThread:
    """Runs one call at a time in a separate thread.

    The caller of `run` waits without holding anything: a Ctrl-C or a heartbeat gets through while a pass is computed. A
    call that its caller broke out of is finished, and the next `run` waits for that one instead of running another.

    To be made by the thread that has made the engine: calls run on the GPU and the stream that this thread is on.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, Future[None]] | None] = queue.SimpleQueue()
        self._under_way: Future[None] | None = None
        # Device, stream and number of threads are those of a thread, not of the process.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, stream, torch.get_num_threads()), name="rollout-engine", daemon=True
        )
        self._thread.start()

    def run(self, call: Call) -> None:
        """Run a call, or wait for the one that is under way. Raises what that call raises."""
        if not self._thread.is_alive():
            raise EngineStateError("the engine is closed; make a new one")
        if self._under_way is None:
            self._under_way = Future()
            self._calls.put((call, self._under_way))
        result = self._under_way.result  # an interrupt in here leaves the call under way
        try:
            result()
        finally:
            if self._under_way.done():
                self._under_way = None

    def settle(self, *, forgets: bool = False) -> None:
        """Wait for a call that its caller broke out of. forgets: drop its error, which the next `run` raises else."""
        if self._under_way is not None:
            self._under_way.exception()
            if forgets:
                self._under_way = None

    def close(self) -> bool:
        """End the thread; return whether it was alive."""
        if not self._thread.is_alive():
            return False
        self.settle()
        self._calls.put(None)
        self._thread.join()
        return True


def _serve(
    calls: queue.SimpleQueue[tuple[Call, Future[None]] | None], stream: torch.cuda.Stream | None, num_threads: int
) -> None:
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    torch.set_num_threads(num_threads)
    while (item := calls.get()) is not None:
        call, future = item
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # a failed step's traceback holds its tensors
