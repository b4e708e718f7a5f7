"""What the soak asks: cases with one right answer each, and requests that must be refused.

Every case is greedy or seeded, so its answer is the same alone and in a crowd.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.bench.grammar_schemas import COUNT, FLAG, obj, one_of, some

VOCABULARY = """
river stone market engine letter window garden captain winter music paper silver bridge number
story island harvest signal copper lantern mountain compass thread orchard
"""
WORDS = VOCABULARY.split()
WITH_USAGE = ("/v1/completions", "/v1/chat/completions")
"""Endpoints whose streams tell of usage if they are asked to."""
TOOL = {"type": "function", "function": {"name": "find", "parameters": obj(exact=FLAG)}}
SCHEMA = obj(colour=one_of("red", "green", "blue"), sizes=some(COUNT, 1, 2), sold=FLAG)


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: unique.
        path: endpoint.
        body: JSON, or bytes to be sent as they are.
        status: of the answer.
        streams: may be asked as a stream as well, with the same content.
    """

    name: str
    path: str
    body: dict[str, Any] | bytes
    status: int = 200
    streams: bool = True

    def payload(self, port: int, *, stream: bool) -> bytes:
        """The HTTP request, on a connection that is closed behind its answer."""
        extra: dict[str, Any] = {"stream": True} if stream else {}
        if stream and self.path in WITH_USAGE:
            extra["stream_options"] = {"include_usage": True}
        body = self.body
        data = body if isinstance(body, bytes) else json.dumps({**body, **extra}).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


def text(rng: random.Random, words: int) -> str:
    """So many words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def good_cases(seed: int, copies: int = 3) -> list[Case]:
    """Several of each kind, no two alike."""
    rng = random.Random(seed)
    kinds = [*_completions(rng, copies), *_chats(rng, copies), *_others(rng, copies)]
    return [
        Case(f"{name} {number}", path, body, streams=streams)
        for number, (name, path, body, streams) in enumerate(kinds)
    ]


type _Kind = tuple[str, str, dict[str, Any], bool]


def _completions(rng: random.Random, copies: int) -> Iterator[_Kind]:
    path = "/v1/completions"
    for _ in range(copies):
        seeded = {"temperature": 1.0, "seed": rng.randrange(1 << 20)}
        kinds: list[tuple[str, int, dict[str, Any]]] = [
            ("one token", 2, {"max_tokens": 1, "temperature": 0}),
            ("greedy", 8, {"max_tokens": rng.randint(5, 30), "temperature": 0}),
            ("long prompt", 70, {"max_tokens": 12, "temperature": 0}),
            ("long answer", 5, {"max_tokens": 120, "ignore_eos": True, **seeded}),
            ("seeded", 12, {"max_tokens": rng.randint(5, 40), **seeded}),
            ("penalties", 9, {"max_tokens": 20, "presence_penalty": 1, **seeded}),
            ("filters", 9, {"max_tokens": 20, "top_k": 20, "top_p": 0.9, **seeded}),
            ("stops", 6, {"max_tokens": 40, "stop": ["e", " t", "zz"], **seeded}),
            ("samples", 7, {"max_tokens": 16, "n": 3, **seeded}),
            ("log-probabilities", 7, {"max_tokens": 10, "logprobs": 2, **seeded}),
            ("echo", 6, {"max_tokens": 6, "echo": True, "temperature": 0}),
            ("regex", 4, {"max_tokens": 30, "guided_regex": "[ab]{3}-[0-9]{2,6}", **seeded}),
            ("choice", 4, {"max_tokens": 30, "guided_choice": WORDS[:6], **seeded}),
        ]
        for name, words, fields in kinds:
            yield name, path, {"prompt": text(rng, words), **fields}, True
        prompts = [text(rng, 3), text(rng, 30)]
        yield "two prompts", path, {"prompt": prompts, "max_tokens": 9, "temperature": 0}, True
        ids = [rng.randrange(40, 200) for _ in range(20)]
        yield "token ids", path, {"prompt": ids, "max_tokens": 9, "temperature": 0}, True


def _chats(rng: random.Random, copies: int) -> Iterator[_Kind]:
    path = "/v1/chat/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "sale", "schema": SCHEMA}}
    for _ in range(copies):
        seeded = {"temperature": 1.0, "seed": rng.randrange(1 << 20)}
        kinds: list[tuple[str, int, dict[str, Any]]] = [
            ("chat", 9, {"max_tokens": 25, "temperature": 0}),
            ("chat log-probabilities", 9, {"max_tokens": 9, "logprobs": True, "top_logprobs": 2}),
            ("schema", 9, {"max_tokens": 60, "response_format": schema, **seeded}),
            ("tools", 1, {"max_tokens": 30, "tools": [TOOL], **seeded}),
            ("forced tool", 1, {"max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}),
            ("chat samples", 9, {"max_tokens": 12, "n": 2, "stop": ["a b"], **seeded}),
        ]
        for name, words, fields in kinds:
            messages = [{"role": "user", "content": text(rng, words)}]
            yield name, path, {"messages": messages, **seeded, **fields}, True


def _others(rng: random.Random, copies: int) -> Iterator[_Kind]:
    for _ in range(copies):
        messages = [{"role": "user", "content": text(rng, 5)}]
        body = {"messages": messages, "max_tokens": 15, "temperature": 0, "model": "soak"}
        yield "message", "/v1/messages", body, True
        body = {"input": text(rng, 6), "max_output_tokens": 15, "temperature": 0}
        yield "response", "/v1/responses", body, True
        body = {"prompt": text(rng, 9), "continuations": [" stone", " river bridge"]}
        yield "score", "/v1/score", body, False
        yield "embedding", "/v1/embeddings", {"input": [text(rng, 4), text(rng, 20)]}, False
        body = {"input": text(rng, 8), "pooling": "last"}
        yield "last embedding", "/v1/embeddings", body, False


def bad_cases() -> list[Case]:
    """Requests that are refused, each in its own way."""
    chat, plain = "/v1/chat/completions", "/v1/completions"
    hello = [{"role": "user", "content": "hello"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    no_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    kinds: list[tuple[str, str, dict[str, Any] | bytes, int]] = [
        ("no JSON", plain, b'{"prompt": "a', 400),
        ("no UTF-8", plain, b'{"prompt": "\xff"}', 400),
        ("no prompt", plain, {}, 400),
        ("unknown field", plain, {"prompt": "a", "no_such_field": 1}, 400),
        ("cold", plain, {"prompt": "a", "temperature": -1}, 400),
        ("too long", plain, {"prompt": "a", "max_tokens": 1 << 30}, 400),
        ("ids outside", plain, {"prompt": [1 << 29]}, 400),
        ("bad regex", plain, {"prompt": "a", "guided_regex": "(a"}, 400),
        ("other model", chat, {"messages": hello, "model": "another"}, 404),
        ("image", chat, {"messages": image}, 400),
        ("bad schema", chat, {"messages": hello, "response_format": no_schema}, 400),
        ("no route", "/v1/nowhere", {"prompt": "a"}, 404),
    ]
    return [Case(name, path, body, status, streams=False) for name, path, body, status in kinds]
