"""Async functions of users, called where nothing else is async."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

_OF_THREAD = threading.local()


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns, also where a loop runs already, as in a notebook.

    All calls of a thread run in one loop, so that a client of a service can be kept between them: it belongs to its
    loop. Calls within a running loop run in a thread beside it, which is theirs too.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        if not hasattr(_OF_THREAD, "runner"):
            _OF_THREAD.runner = asyncio.Runner()
            weakref.finalize(threading.current_thread(), _OF_THREAD.runner.close)  # cancels what still waits
        return _OF_THREAD.runner.run(coroutine)
    return _thread_beside(running).submit(run_to_end, coroutine).result()


@lru_cache(maxsize=8)
def _thread_beside(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor:
    """Returns the thread for calls within a loop. Each loop has its own, so that calls within calls do not wait."""
    return ThreadPoolExecutor(1)
