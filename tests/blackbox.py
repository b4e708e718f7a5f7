"""A black-box kit of acceptance tests against a started `octavo serve`.

    python tests/blackbox.py FOLDER [pytest's arguments]

The kit is a folder of tests that know a server by its URL alone; `make test-blackbox` runs it
whole, tests/test_openai_client.py a part of it where it is found.
"""

import re
import subprocess
import sys
from pathlib import Path

KIT = Path(__file__).resolve().parents[2] / "shared" / "blackbox"
MODEL = "smollm2"


def run_kit(folder, url, arguments=()):
    """Run the kit's tests, extensions of the API included; the exit code and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--base-url", url, "--model", MODEL, "--strict-ext", "--time-scale", "6"]
    command += arguments
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main(folder, *arguments):
    """Start a server, run the kit, end the server; the kit's exit code."""
    command = [sys.executable, "-m", "octavo.serve.cli", "serve", f"--model={MODEL}", "--port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        code, output = run_kit(folder, _address(server), arguments)
        print(output)
        return code
    finally:
        server.terminate()
        server.wait()


def _address(server):
    """Where it serves, which it says once it does."""
    for line in server.stdout:
        if said := re.search(r"serving .* on (http://\S+)", line):
            return said[1]
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
