"""A black-box kit of acceptance tests against a started `octavo serve`.

    python tests/blackbox.py FOLDER [pytest's arguments]

The kit is a folder of tests that know a server by its URL alone; `make test-blackbox` runs it
whole, tests/test_openai_client.py a part of it where it is found.
"""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from ports import free_port

KIT = Path(__file__).resolve().parents[2] / "shared" / "blackbox"
MODEL = "smollm2"
START_SECONDS = 600


def run_kit(folder, url, arguments=()):
    """Run the kit's tests, extensions of the API included; the exit code and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--base-url", url, "--model", MODEL, "--strict-ext", "--time-scale", "6"]
    command += arguments
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main(folder, *arguments):
    """Start a server, run the kit, end the server; the kit's exit code."""
    port = free_port()
    command = [sys.executable, "-m", "octavo.serve.cli", "serve", f"--model={MODEL}"]
    server = subprocess.Popen([*command, f"--port={port}"])
    try:
        _wait(server, port)
        code, output = run_kit(folder, f"http://127.0.0.1:{port}", arguments)
        print(output)
        return code
    finally:
        server.terminate()
        server.wait()


def _wait(server, port):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
