#!/bin/bash
# openenv 0.10.0: a client whose server was restarted goes on in another session, which was never reset, without an error.
#
# A session of an OpenEnv server is a WebSocket connection, and its environment lives as long as that. If the connection
# is lost between two steps (the server restarts, a keep-alive or a proxy times out), the next step() opens another one and
# is taken there: by a new environment on which reset() was never called. The client raises nothing and its result says
# nothing, so an episode goes on from somewhere else, and its rewards are summed up over two of them. While the server is
# still away, the same step() raises ConnectionError, so the outcome depends on how quickly it comes again. Way round:
# compare the client's connection (client._ws) before and after a step, and begin the episode again if it is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openenv==0.10.0
cat >"$folder/server.py" <<'P'
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Add(Action):
    number: int

class Sum(Observation):
    total: int = 0

class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.total, self.was_reset = -1000, False

    def reset(self, seed=None, episode_id=None, **_):
        self.total, self.was_reset = seed or 0, True
        return Sum(total=self.total, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.total += action.number
        return Sum(total=self.total, done=False, reward=1.0 if self.was_reset else -1.0)

    @property
    def state(self):
        return State(episode_id="e", step_count=0)

class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

app = create_app(Counter, Add, Sum, env_name="counter", max_concurrent_envs=4)
Told(uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")).run()
P
cat >"$folder/program.py" <<'P'
import importlib.metadata
import subprocess
import sys
from openenv.core import GenericEnvClient

def start(port):
    """A server at this port, 0 = any; and its port, which it tells when it listens."""
    server = subprocess.Popen([sys.executable, "server.py", str(port)], stdout=subprocess.PIPE, text=True)
    return server, int(server.stdout.readline())

def step():
    result = client.step({"number": 1})
    return result.observation["total"], result.reward

print(f"openenv {importlib.metadata.version('openenv')}")
server, port = start(0)
client = GenericEnvClient(base_url=f"http://127.0.0.1:{port}").sync()
begun = client.reset(seed=40).observation["total"]
first = step()
server.kill()
server.wait()
try:
    away = repr(step())
except ConnectionError:
    away = "ConnectionError"
server, _ = start(port)
after = step()
client.close()
server.kill()
print(f"  reset: total {begun}; step: total and reward {first}")
print(f"  step while the server is away: {away}")
print(f"  step after it has come again: {after}, of an environment that was never reset")
sys.exit((begun, first, away, after) != (40, (41, 1.0), "ConnectionError", (-999, -1.0)))
P
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
