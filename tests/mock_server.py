"""Starts the real server around the mock engine: `python mock_server.py JSON`."""

import json
import sys

from mock_engine import MockConfig

from octavo.serve.config import ServerConfig
from octavo.serve.server import Parts, run


def main(settings):
    server = ServerConfig(**{"port": 0, "served_model_name": ("mock",), **settings["server"]})
    parts = Parts("mock_engine:make", settings.get("tokenizer", "mock_engine:tokenizer"))
    code = run(MockConfig(**settings["engine"]), server, parts)
    print("jax" in sys.modules, flush=True)
    return code


def no_tokenizer(config):
    return None


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
