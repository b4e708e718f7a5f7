"""response_format, structured_outputs and guided_*: which grammar each asks for, what is refused.

The mock engine answers a request with its grammar, written out.
"""

import json

import pytest
from mock_server import running

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "é\n"}}}
WRITTEN = json.dumps(SCHEMA, ensure_ascii=False)


@pytest.fixture(scope="module")
def srv():
    with running() as server:
        yield server


def schema_format(schema=SCHEMA, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": None, "json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, "json_object "),
    ({"response_format": schema_format()}, f"json_schema {WRITTEN}"),
    ({"response_format": schema_format(strict=True)}, f"json_schema {WRITTEN}"),
    ({"response_format": schema_format(description="d")}, f"json_schema {WRITTEN}"),
    ({"structured_outputs": {"json": SCHEMA}}, f"json_schema {WRITTEN}"),
    ({"structured_outputs": {"json": WRITTEN}}, f"json_schema {WRITTEN}"),
    ({"structured_outputs": {"json_object": True}}, "json_object "),
    ({"structured_outputs": {"regex": "a+"}}, "regex a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, 'choice ["a", "b"]'),
    ({"structured_outputs": {"grammar": "start: A"}}, "lark start: A"),
    ({"guided_json": SCHEMA}, f"json_schema {WRITTEN}"),
    ({"guided_regex": "a+", "guided_decoding_backend": "guidance"}, "regex a+"),
    ({"guided_choice": ["a", "b"]}, 'choice ["a", "b"]'),
    ({"guided_grammar": "start: A", "response_format": {"type": "text"}}, "lark start: A"),
]


@pytest.mark.parametrize(("fields", "written"), ASKED)
def test_what_is_asked_reaches_the_engine(srv, fields, written):
    chat = srv.good(srv.chat("hi", max_tokens=400, **fields))
    choice = chat["choices"][0]
    if written is None:
        assert choice["message"]["content"].startswith("user:hi")
        return
    assert choice["message"]["content"] == written
    assert choice["finish_reason"] == "stop"
    completion = srv.good(srv.complete("ab", max_tokens=400, n=2, **fields))
    assert [c["text"] for c in completion["choices"]] == [written, written]


DENSE_SCHEMA = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
DENSE_OBJECT = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
OPTIONS = {"key_separator": ": "}


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        ({"json": SCHEMA}, DENSE_SCHEMA),
        ({"json": WRITTEN}, DENSE_SCHEMA),
        ({"json_object": True}, DENSE_OBJECT),
        (
            {"json": {"x-guidance": OPTIONS}},
            {"x-guidance": {**OPTIONS, "whitespace_flexible": False}},
        ),
    ],
)
def test_json_without_whitespace(srv, asked, schema):
    fields = {"structured_outputs": {"disable_any_whitespace": True, **asked}}
    chat = srv.good(srv.chat("hi", max_tokens=400, **fields))
    written = json.dumps(schema, ensure_ascii=False)
    assert chat["choices"][0]["message"]["content"] == f"json_schema {written}"


REFUSED = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": []}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": ["text"]}}, "response_format"),
    ({"response_format": {"type": "no_such_format"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": schema_format(schema=5)}, "response_format"),
    ({"response_format": schema_format(strict="yes")}, "response_format"),
    ({"response_format": schema_format(regex="a")}, "response_format"),
    ({"response_format": schema_format(schema={"enum": ["x" * 70_000]})}, "response_format"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
    *[
        ({"structured_outputs": {"disable_any_whitespace": True, **asked}}, "structured_outputs")
        for asked in (
            {"regex": "a"},
            {"json": SCHEMA, "json_object": True},
            {"json": "{"},
            {"json": 5},
            {"json": "[" * 60_000},
            {"json_object": 1},
            {"json": {"x-guidance": 5}},
        )
    ],
    ({"structured_outputs": {"disable_any_whitespace": "yes", "json": {}}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_regex": "x" * 70_000}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": schema_format(), "guided_json": SCHEMA}, "guided_json"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_malformed_is_a_400_naming_the_field(srv, fields, param):
    for answer in (srv.chat("hi", **fields), srv.complete("hi", stream=True, **fields)):
        status, _, body = answer
        assert status == 400, body
        assert body["error"]["param"] == param
        assert param in body["error"]["message"]
        assert len(body["error"]["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_naming_the_field_and_the_reason(srv, stream):
    status, _, body = srv.chat("hi", guided_regex="REFUSED", stream=stream)
    assert status == 400, body
    assert body["error"]["param"] == "guided_regex"
    assert body["error"]["message"] == "guided_regex: no such feature"
    assert body["error"]["type"] == "invalid_request_error"
    assert srv.chat("hi")[0] == 200


def test_a_stream_joins_to_the_answer(srv):
    body = {"model": "mock", "prompt": "ab", "max_tokens": 400, "guided_json": SCHEMA}
    events = srv.stream("/v1/completions", body)
    texts = [e["choices"][0]["text"] for e in events if e != "[DONE]" and e["choices"]]
    assert "".join(texts) == f"json_schema {WRITTEN}"


def test_schemas_nested_beyond_reason_harm_nobody(srv):
    for depth in (150, 400, 2000):
        nested = '{"items":' * depth + "{}" + "}" * depth
        raw = '{"model":"mock","prompt":"a","guided_json":' + nested + "}"
        assert srv.post("/v1/completions", raw.encode())[0] in (200, 400)
    assert srv.chat("hi")[0] == 200
