"""Ray's ranks as forks: stands in for Ray's file of this name, which its raylet runs to start a worker.

If the server (`tests/distributed/forks.py`) is open, it forks the worker, and this process only lasts as long as that
one: whichever of the two ends, the other ends too, this one with the exit status of the other. Otherwise Ray's own file
runs. Imports nothing that takes time.
"""

import json
import os
import runpy
import socket
import sys

SOCKET = os.environ.get("HYBRID_RL_TEST_FORKS", "")


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(SOCKET)
        except OSError:
            runpy.run_path(os.environ["HYBRID_RL_TEST_SETUP_WORKER"], run_name="__main__")
            return
        call = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(server, [len(call).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(call)
        status = b""
        while told := server.recv(1):
            status = told
    # None is told by what was killed, or has ended past its interpreter, as Ray's workers do.
    sys.exit(status[0] if status else 1)


main()
