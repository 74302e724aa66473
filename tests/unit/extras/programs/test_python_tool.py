"""Hostile programs get nowhere, whatever the kernel confines them with, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from hybrid_rl.agents.schemas import tool_schema
from hybrid_rl.errors import ConfigError, SandboxError
from hybrid_rl.extras.programs.python_tool import PythonTool
from hybrid_rl.extras.sandbox import sandbox_strength
from hybrid_rl.extras.sandbox.filter import seccomp_filter

STRENGTH = sandbox_strength()
pytestmark = pytest.mark.skipif(
    isinstance(STRENGTH, str) or not STRENGTH.is_strict, reason=f"no sandbox on this machine: {STRENGTH}"
)

SECONDS = 1.0
TIME = rf"\[ended: it ran for more than {SECONDS:g} s\]"
REFUSED = "PermissionError|Operation not permitted|Permission denied"
# The C library's own door to the kernel: no Python code between.
SYSCALL = "import ctypes, os\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
REACH = "import socket\nsocket.{}\nprint(OUT)"
# Answers quote the program, which therefore does not hold the word that none may show.
OUT = "OUT = 'esc' + 'aped'\n"

# name: (program, what its answer must show); OUT is "escaped", which no answer may show.
HOSTILE: dict[str, tuple[str, str]] = {
    "fork bomb": ("import os\nwhile True: os.fork()", REFUSED),
    "fork by clone3 and vfork": (
        SYSCALL + "a = bytearray(88)\n"
        "for number in (435, 58, 57):\n"
        "    if call(number, (ctypes.c_char * 88).from_buffer(a), 88) >= 0: print(OUT)\n"
        "print('barred')",
        "barred",
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**8))", "MemoryError"),
    "one great allocation": ("print(len(bytearray(10**12)))", "MemoryError"),
    "memory in threads": (
        "import threading\ndef eat():\n  x = []\n  while True: x.append(bytearray(10**6))\n"
        "for _ in range(20): threading.Thread(target=eat).start()",
        "MemoryError|can't start new thread|ended",
    ),
    "threads without end": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "can't start new thread|ended",
    ),
    "infinite loop": ("while True: pass", TIME),
    "sleep": ("import time\nprint('so far', flush=True)\ntime.sleep(60)", "so far\n" + TIME),
    "signals ignored": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nwhile True: pass",
        TIME,
    ),
    "every exception caught": (
        "import time\nwhile True:\n  try:\n    while True: time.sleep(1)\n  except BaseException: pass",
        TIME,
    ),
    "huge output": ("while True: print('x' * 100000)", "left out.*ended: it (printed more|ran for)"),
    "a big file": (
        "with open('big', 'wb') as f:\n  for _ in range(100): f.write(bytes(10**6))\nprint(OUT)",
        r"OSError|File too large|No space|PermissionError",
    ),
    "many files": (
        "for i in range(10**6):\n  with open(str(i), 'w') as f: f.write('x')",
        "No space|PermissionError|" + TIME,
    ),
    "files open": ("held = [open('/dev/null') for _ in range(65)]", "Too many open files"),
    "password file": ("print(open('/etc/passwd').read(), OUT)", "FileNotFoundError|PermissionError"),
    "environment": ("import os\nprint(sorted(os.environ))", r"\['LC_ALL', .*'PYTHONHASHSEED'\]"),
    "environment of the parent": (
        "import os\nfor pid in (os.getppid(), 1, '{parent}'):\n  try: print(open(f'/proc/{pid}/environ').read(), OUT)\n"
        "  except OSError as e: print(type(e).__name__)",
        "FileNotFound|Permission",
    ),
    "memory of the parent": (
        SYSCALL
        + "import struct\nbuf = ctypes.create_string_buffer(16)\nown = struct.pack('PN', ctypes.addressof(buf), 16)\n"
        "print(OUT if call(310, os.getppid(), own, 1, own, 1, 0) >= 0 else 'barred')",
        "barred",
    ),
    "internet": (REACH.format("create_connection(('1.1.1.1', 53), timeout=5)"), REFUSED),
    "loopback": (REACH.format("create_connection(('127.0.0.1', {port}), timeout=5)"), REFUSED),
    "unix socket": (REACH.format("socket(socket.AF_UNIX).connect('{socket}')"), REFUSED),
    "datagrams by a pair": (
        REACH.format("socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '{socket}')"),
        REFUSED,
    ),
    "raw socket": (SYSCALL + "print(OUT if call(41, 17, 3, 0) >= 0 else os.strerror(ctypes.get_errno()))", REFUSED),
    "io_uring": (SYSCALL + "print(OUT if call(425, 8, bytes(120)) >= 0 else 'barred')", "barred"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)\nprint(OUT)", REFUSED),
    "kill everyone": ("import os\nos.kill(-1, 9)\nprint(OUT)", REFUSED),
    "kill the group": ("import os\nos.killpg(0, 9)\nprint(OUT)", REFUSED),
    "signals by a file": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())\nprint(OUT)",
        REFUSED,
    ),
    "ptrace": (SYSCALL + "print(OUT if call(101, 16, os.getppid(), 0, 0) >= 0 else 'barred')", "barred"),
    "limits of others": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\nprint(OUT)",
        REFUSED,
    ),
    "limits raised": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint(OUT)",
        "not allowed to raise maximum limit",
    ),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(99)\nprint(OUT)",
        REFUSED,
    ),
    "subprocess": ("import subprocess\nprint(subprocess.check_output(['ls', '/']), OUT)", REFUSED),
    "exec": ("import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'echo esc''aped'])", REFUSED + "|FileNotFound"),
    "outputs closed": ("import os\nos.closerange(0, 100)\nwhile True: pass", TIME),
    "descriptors of the warden": (
        "import os\nfor fd in range(3, 500):\n  try: os.fstat(fd); print(OUT, fd)\n  except OSError: pass\n"
        "print('none')",
        "none",
    ),
    "files deleted": (
        "import json, os, shutil\nshutil.rmtree(os.path.dirname(json.__file__), ignore_errors=True)\n"
        "for path in ({folder!r}, os.__file__):\n"
        "  try:\n    os.remove(path); print(OUT)\n  except OSError: pass\nprint('barred')",
        "barred",
    ),
    "modes changed": (
        "import os\nfor path in ({folder!r}, os.__file__, '/'):\n  try: os.chmod(path, 0o777); print(OUT)\n"
        "  except OSError: pass\nprint('barred')",
        "barred",
    ),
    "files truncated": (
        "import os\ntry:\n  os.open({folder!r} + '/secret', os.O_RDONLY | os.O_TRUNC); print(OUT)\n"
        "except OSError: print('barred')",
        "barred",
    ),
    "links to a secret": (
        "import os\ntry:\n  os.symlink({folder!r} + '/secret', 'link')\n  print(open('link').read(), OUT)\n"
        "except OSError as e: print(e)",
        "No such file|" + REFUSED,
    ),
    "way up": ("print(open('../../../../../..' + {folder!r} + '/secret').read(), OUT)", "No such file|" + REFUSED),
    "mount": (SYSCALL + "print(OUT if call(165, b'a', b'/', b'tmpfs', 0, 0) >= 0 else 'barred')", "barred"),
    "chroot": ("import os\nos.chroot('/')\nprint(OUT)", REFUSED),
    "namespaces of its own": (SYSCALL + "print(OUT if call(272, 0x10000000) >= 0 else 'barred')", "barred"),
    "root again": ("import os\nos.setuid(0)\nprint(OUT)", REFUSED),
    "deep recursion": ("def f(): return f()\nf()", "RecursionError"),
    "deeper recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\n"
        "class A:\n  def __getattr__(self, name): return getattr(self, name)\nA().x",
        "ended by signal 11|MemoryError|ended|RecursionError",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", "ended by signal 11"),
    "power bomb": ("print(9 ** 9 ** 9 ** 9)", TIME),
    "exit": ("import sys\nprint('before')\nsys.exit(3)", "^before$"),
    "exit at once": ("import os\nprint('before')\nos._exit(7)", "^before$"),
    "site packages": ("import torch\nprint(OUT)", "ModuleNotFoundError"),
    "this package": ("import hybrid_rl.run.trainer\nprint(OUT)", "ModuleNotFoundError"),
    "broken text": ("print('\\udcff')", "udcff"),
    "no program": ("this is no Python", "SyntaxError"),
    "null bytes": ("print('a\\0b')", "a\0b"),
}
if platform.machine() != "x86_64":  # the numbers of system calls are that machine's
    HOSTILE = {name: (code, shown) for name, (code, shown) in HOSTILE.items() if SYSCALL not in code}


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The answers of all programs, which run at once."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("escaped")
    os.environ["HYBRID_RL_TEST_SECRET"] = "escaped"
    tool = PythonTool(SECONDS, 200 * 2**20, 2000, max_running=len(HOSTILE))
    tool._layers["namespaces"] = request.param == "namespaces"
    if request.param == "landlock" and not _is_strict(tool):
        pytest.skip("no Landlock on this machine")
    strength = tool.strength()
    assert ("a private root" in strength.means) == (request.param == "namespaces") and strength.is_strict

    async def ask() -> list[str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reached.append(1)
            writer.close()

        local = await asyncio.start_unix_server(serve, path=str(folder / "s"))
        served = await asyncio.start_server(serve, "127.0.0.1", 0)
        places = {
            "{port}": str(served.sockets[0].getsockname()[1]),
            "{socket}": str(folder / "s"),
            "{folder!r}": repr(str(folder)),
            "{parent}": str(os.getpid()),
        }
        programs = []
        for code, _ in HOSTILE.values():
            for mark, value in places.items():
                code = code.replace(mark, value)
            programs.append(OUT + code)
        async with local, served:
            return await asyncio.gather(*(tool.python(code) for code in programs))

    reached: list[int] = []
    processes = psutil.Process(tool._ready()._process.pid)
    try:
        found = asyncio.run(ask())
        assert not reached
        assert (folder / "secret").read_text() == "escaped" and oct(folder.stat().st_mode)[-3:] == "700"
        # The warden, and in its namespace one process more.
        assert len(processes.children(recursive=True)) == (request.param == "namespaces")
        yield dict(zip(HOSTILE, found, strict=True))
    finally:
        del os.environ["HYBRID_RL_TEST_SECRET"]
        tool.close()
        assert not processes.is_running()


def _is_strict(tool: PythonTool) -> bool:
    try:
        return tool.strength().is_strict
    except SandboxError:
        return False


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nowhere(answers: dict[str, str], name: str) -> None:
    answer = answers[name]
    assert "escaped" not in answer, answer
    assert re.search(HOSTILE[name][1], answer, re.DOTALL), answer
    assert len(answer) < 2200


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with contextlib.closing(PythonTool(2.0, output_chars=200)) as made:
        yield made


def test_programs_do_ordinary_work(tool: PythonTool) -> None:
    code = """
import asyncio, csv, json, math, random, re, sqlite3, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
with open("own.py", "w") as file:
    file.write("x = 1")
import own
with open("data.csv", "w") as file:
    csv.writer(file).writerows([[1, 2], [3, 4]])
rows = list(csv.reader(open("data.csv")))
base = sqlite3.connect("base.db")
base.execute("create table t (x)")
async def late(x):
    await asyncio.sleep(0.001)
    return x
with ThreadPoolExecutor(4) as pool:
    squares = list(pool.map(lambda x: x * x, range(5)))
print(rows, squares, asyncio.run(late(7)), math.comb(5, 2), __name__)
random.random()
"""
    expected = "[['1', '2'], ['3', '4']] [0, 1, 4, 9, 16] 7 10 __main__\n0.8444218515250481"  # random.Random(0)
    assert asyncio.run(tool.python(code)) == expected


def test_a_private_root_is_read_only_below_its_mounts_too(tool: PythonTool) -> None:
    if "a private root" not in tool.strength().means:
        pytest.skip("no namespaces on this machine")
    look = "import os\n[bool(os.statvfs(path).f_flag & os.ST_RDONLY) for path in (os.__file__, '/', '.')]"
    assert tool.run(look).output == "[True, True, False]\n"


def test_nothing_is_kept_from_one_program_to_the_next(tool: PythonTool) -> None:
    look = "import os, builtins\nprint(os.listdir('.'), hasattr(builtins, 'kept'), hash('a'))"
    first = tool.run(look)
    tool.run("import builtins\nbuiltins.kept = 1\nopen('kept', 'w').close()")
    assert tool.run(look).output == first.output
    with contextlib.closing(PythonTool(2.0)) as another:  # strings hash alike, so that sets print alike
        assert another.run(look).output == first.output


def test_answers_have_errors_without_our_frames_and_lose_their_middle(tool: PythonTool) -> None:
    error = r'Traceback \(most recent call last\):\n  File "<program>", line 2, in <module>\n    1 / 0\n[ ~^]+\n'
    assert re.fullmatch(error + "ZeroDivisionError: division by zero", asyncio.run(tool.python("\n1 / 0")))
    assert asyncio.run(tool.python("x = 1")) == "(no output)"
    long = asyncio.run(tool.python("print('a' * 500 + 'b' * 500)"))
    assert long.startswith("a" * 100 + "\n[") and long.endswith("]\n" + "b" * 99)


def test_a_cancelled_call_ends_its_program_and_no_other(tool: PythonTool) -> None:
    async def race() -> str:
        other = asyncio.ensure_future(tool.python("import time\ntime.sleep(0.4)\nprint('whole')"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tool.python("import time\ntime.sleep(60)"), 0.1)
        while len(warden.children(recursive=True)) > 2:
            await asyncio.sleep(0.01)
        return await other

    warden = psutil.Process(tool._ready()._process.pid)
    assert asyncio.run(race()) == "whole"


def test_a_sandbox_that_died_fails_the_call_and_is_made_again(tool: PythonTool) -> None:
    future = tool.start("import time\ntime.sleep(60)")
    tool._ready()._process.kill()
    with pytest.raises(SandboxError, match="the sandbox died"):
        future.result(10)
    assert tool.run("print(1)").output == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_outlives_a_process_that_was_killed(namespaces: bool) -> None:
    script = (
        "from hybrid_rl.extras.programs.python_tool import PythonTool\ntool = PythonTool(60)\n"
        f"tool._layers['namespaces'] = {namespaces}\n"
        "tool.start('while True: pass')\nprint(tool._ready()._process.pid, flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        warden = psutil.Process(int(owner.stdout.readline()))
        family = [warden, *warden.children(recursive=True)]
        owner.kill()
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_tool_that_nobody_holds_ends_its_process() -> None:
    tool = PythonTool()
    process = tool._ready()._process
    del tool
    gc.collect()
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.returncode is not None


def test_tools_travel_and_describe_themselves(tool: PythonTool) -> None:
    with contextlib.closing(pickle.loads(pickle.dumps(tool))) as copy:
        assert copy.run("1 + 1").output == "2\n"
    schema = tool_schema(tool.python)["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]
    with pytest.raises(ConfigError, match="a method of this object: it has `.python`"):
        tool_schema(tool)  # type: ignore[arg-type]


def test_packages_can_be_shown() -> None:
    with contextlib.closing(PythonTool(10.0, 2**30, packages=("numpy",))) as tool:
        assert tool.run("import numpy as np\nint(np.arange(5).sum())").output == "10\n"
    with pytest.raises(ConfigError, match="not an installed"):
        PythonTool(packages=("no_such_package",))


def test_memory_that_python_itself_would_not_fit_into_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"memory_bytes=512\): .* at least 33554432 bytes"):
        PythonTool(memory_bytes=512)  # bytes, not MiB
    with PythonTool(memory_bytes=2**25) as tool:
        assert tool.run("import json, random\nsum(range(10))").output == "45\n"
        process = tool._ready()._process
    assert process.returncode is not None


def test_strict_tools_refuse_a_weak_machine_and_others_warn(caplog: pytest.LogCaptureFixture) -> None:
    without = {"namespaces": False, "filter": False, "landlock": False}
    weak = PythonTool()
    weak._layers = dict(without)
    with pytest.raises(SandboxError, match="open: network, files, processes"):
        weak.run("1")
    with contextlib.closing(PythonTool(strict=False)) as tool:
        tool._layers = dict(without)
        assert tool.run("1").output == "1\n" and not tool.strength().is_strict
    assert "is weak on this machine" in caplog.text


def test_filters_know_two_machines() -> None:
    sizes = [len(seccomp_filter(machine, 1, may_write=True)) for machine in ("x86_64", "aarch64")]
    assert all(size % 8 == 0 and size // 8 < 4096 for size in sizes)  # BPF_MAXINSNS
    with pytest.raises(OSError, match="riscv64"):
        seccomp_filter("riscv64", 1, may_write=True)
