"""Tools that take the keys of their calls. Tool processes import this file, so it imports little."""

import os
import signal


def keyed(number: int, call_key: str) -> str:
    """Give a number back.

    Args:
        number: which
    """
    return f"{number} {call_key}"


async def keyed_later(number: int, call_key: str) -> str:
    """Give a number back.

    Args:
        number: which
    """
    return f"{number} {call_key}"


def die_once(path: str, call_key: str) -> str:
    """Kill the process of the first call.

    Args:
        path: of a file that says whether there was one
    """
    with open(path, "a") as file:
        file.write(f"{call_key}\n")
    with open(path) as file:
        if len(file.readlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return "done"
