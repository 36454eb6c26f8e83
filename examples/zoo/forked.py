"""One process an item, forked after the imports: what crashes or hangs costs itself alone."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from typing import Callable, Sequence, TypeVar

T = TypeVar("T")


def each(items: Sequence[T], work: Callable[[T], None], done: Callable[[int, T, str, float], None], jobs: int, seconds: float) -> None:
    """Calls work(item) in processes, `jobs` at a time, and done(number, item, how it ended, seconds it took) after each."""
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(items, 1))
    running: dict[int, tuple[multiprocessing.process.BaseProcess, int, T, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, item = waiting.pop(0)
            process = context.Process(target=work, args=(item,))
            process.start()
            running[process.sentinel] = (process, number, item, time.monotonic())
        oldest = min(start for _, _, _, start in running.values())
        ended = multiprocessing.connection.wait(list(running), timeout=max(0.0, oldest + seconds - time.monotonic()))
        late = [] if ended else [s for s, entry in running.items() if time.monotonic() - entry[3] >= seconds]
        for sentinel in late:
            running[sentinel][0].kill()
        for sentinel in [*ended, *late]:
            process, number, item, start = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            how = f"took longer than {seconds:.0f} s" if sentinel in late else f"ended with code {process.exitcode}"
            done(number, item, how, time.monotonic() - start)
