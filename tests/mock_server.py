"""The real server around the mock engine, as a process, and a plain HTTP client for it.

`python mock_server.py JSON` is the process; `running(...)` starts one for a test.
"""

import contextlib
import functools
import gc
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mock_engine import MockConfig

HERE = Path(__file__).parent
PATIENCE = 60
"""Seconds that a busy machine may take."""

ADDRESS = re.compile(r"(?:listening|serving .*) on https?://[^:\s]+:(\d+)[,\n]")
"""How a server says which free port it has taken: one that a test looked for could be lost."""

HEAVY = {"jax", "jaxlib", "torch", "transformers", "opentelemetry.sdk"}


def main(settings):
    from octavo.serve.config import ServerConfig
    from octavo.serve.server import Parts, run

    if settings.get("jumping_clock"):
        jump_clock()
    fields = {"served_model_name": ("mock", "alias/x"), **settings["server"]}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    server = ServerConfig(**fields)
    parts = Parts("mock_engine:make", settings["tokenizer"])
    code = run(MockConfig(**settings["engine"]), server, parts)
    loaded = sorted(set(sys.modules) & HEAVY)
    print("heavy modules:", loaded, flush=True)
    print("objects that collections skip:", gc.get_freeze_count(), flush=True)
    return code


def jump_clock():
    """The wall clock jumps by years at each look, back and forth."""
    jumps = itertools.cycle([0, 9e8, -9e8, 3e8])
    real = time.time
    time.time = lambda: real() + next(jumps)


def no_tokenizer(config):
    return None


def bad_tokenizer(config):
    raise ValueError("no tokenizer here")


class Running:
    """A server process and how to talk to it; in `folder` are its log and what holds the mock."""

    def __init__(self, process, folder):
        self.process, self._folder = process, Path(folder)

    @functools.cached_property
    def port(self):
        self.wait(lambda: ADDRESS.search(self.log) or self.process.poll() is not None)
        said = ADDRESS.search(self.log)
        assert said, self.log
        return int(said[1])

    @property
    def log(self):
        return (self._folder / "log").read_text()

    @contextlib.contextmanager
    def hold(self):
        """Until its end, or `release`, what the mock engine can be told to hold waits."""
        (self._folder / "hold").touch()
        try:
            yield
        finally:
            self.release()

    def release(self):
        (self._folder / "hold").unlink(missing_ok=True)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def request(self, method, path, body=None, headers=None):
        """Status, headers and parsed body of one exchange."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            data = response.read()
        kind = response.headers.get("content-type", "")
        return response.status, response.headers, json.loads(data) if "json" in kind else data

    def post(self, path, body=None, **headers):
        return self.request("POST", path, body, headers)

    def get(self, path, **headers):
        return self.request("GET", path, None, headers)

    def complete(self, prompt, **fields):
        body = {"model": "mock", "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/completions", body)

    def chat(self, messages, **fields):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "mock", "messages": messages, "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", body)

    def good(self, answer):
        status, _, body = answer
        assert status == 200, (status, body)
        return body

    def stream(self, path, body):
        """Events of a stream, "[DONE]" included as a string."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps({"stream": True, **body}))
            response = connection.getresponse()
            data = response.read()
        assert response.status == 200, data
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [e.removeprefix(b"data: ") for e in data.split(b"\n\n") if e]
        return [e.decode() if e == b"[DONE]" else json.loads(e) for e in events]

    def metric(self, name):
        """Value of a metric's first sample; nan where the process that answers has none."""
        _, _, text = self.get("/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(name)]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else float("nan")

    def wait(self, condition, seconds=PATIENCE):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.02)

    def idle(self):
        return self.metric("vllm:num_requests_running") == 0

    def status(self):
        try:
            return self.get("/health")[2]["status"]
        except OSError:
            return "closed"

    def settled(self):
        """Whether it serves; a start that failed shows its log at once."""
        assert self.process.poll() is None, self.log
        return self.status() == "ready"

    def everywhere(self, look):
        """What all API processes say: of so many connections, which the kernel spreads, each finds
        one of two, so that none is overlooked but once in a thousand million times."""
        return {look() for _ in range(30)}

    def core_pid(self):
        return self.children("octavo.serve.core")[0]

    def children(self, module):
        """Ids of the child processes that run `module`."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in lists for pid in path.read_text().split()]
        return [pid for pid in pids if module in _command(pid)]

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)


@contextlib.contextmanager
def running(
    *,
    wait=True,
    tokenizer="mock_engine:tokenizer",
    engine=None,
    stderr=None,
    jumping_clock=False,
    held=False,
    **server,
):
    """A server process; killed at the end if it still runs.

    `stderr` takes its log instead; `held` holds the mock engine from the start.
    """
    folder = tempfile.mkdtemp()
    if held:
        Path(folder, "hold").touch()
    settings = {
        "engine": {"hold_file": f"{folder}/hold", **(engine or {})},
        "tokenizer": tokenizer,
        "jumping_clock": jumping_clock,
        "server": {"port": 0, **server},
    }
    command = [sys.executable, str(HERE / "mock_server.py"), json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))}
    with open(f"{folder}/log", "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=stderr or subprocess.STDOUT
        )
    server_process = Running(process, folder)
    try:
        if wait:
            server_process.wait(server_process.settled)
        yield server_process
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


def gone(pid):
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
