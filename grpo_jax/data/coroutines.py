"""Async functions of users, called where nothing else is async."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, also where a loop runs already, as in a notebook: then a thread of its own runs it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
