from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hybrid_rl.controller.placement import Place
from hybrid_rl.controller.processes import describe_process, end_processes

WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user below a folder with Ray's name, by whose command nobody may take it for a rank."""
    command = [sys.executable, "-c", WAIT, "/srv/ray/train.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline() == b"\n"
        yield started
        started.kill()


def test_a_process_that_has_the_id_of_an_ended_rank_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    place = Place(0, "node", "127.0.0.1", "box", process.pid, is_here=True)
    end_processes([place], 0.0)
    assert process.poll() is None and describe_process(place) == f"pid {process.pid} on box"


def test_a_rank_of_this_node_ends_and_one_of_another_does_not() -> None:
    """Ray titles its workers. Two hosts, in containers say, may have one name."""
    command = ["ray::RankServer.call", "-c", WAIT]
    with subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"\n"
        here = Place(0, "node", "127.0.0.1", "box", rank.pid, is_here=True)
        end_processes([replace(here, is_here=False)], 0.0)
        assert rank.poll() is None
        assert "on this machine is" in describe_process(here)
        end_processes([here], 60.0)
        rank.wait(60)  # it reads for ever otherwise
