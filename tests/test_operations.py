"""Dashboard, alert rules, runbook and coverage table against what the server really has."""

import ast
import asyncio
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.serve import (
    messages_protocol,
    protocol,
    responses_protocol,
    routes_admin,
    routes_embeddings,
    routes_messages,
    routes_openai,
    routes_ops,
    routes_responses,
    routes_score,
)
from octavo.serve.auth import KeyRing
from octavo.serve.config import ServerConfig
from octavo.serve.errors import ApiError
from octavo.serve.metrics import ServerCollector, exposition
from octavo.serve.types import EngineStats

ROUTERS = (
    routes_admin,
    routes_openai,
    routes_responses,
    routes_messages,
    routes_embeddings,
    routes_score,
    routes_ops,
)
BODIES = (
    protocol.CompletionBody,
    protocol.ChatBody,
    responses_protocol.ResponsesBody,
    messages_protocol.MessagesBody,
)
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAME = re.compile(r"(?:vllm|octavo):[a-z0-9_]+")
ROW = re.compile(r"^\| ([^|]+) \| `(tests/[a-z0-9_]+\.py)::(\w+)` \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def samples():
    """Names of all samples and families in the text of /metrics."""
    keys = KeyRing(ServerConfig(api_key="x"), {})
    asyncio.run(keys.enter(b"x"))
    collector = ServerCollector("m")
    collector.stats, collector.restarts = EngineStats(), 0
    collector.recorder.note_keys(keys)
    text = exposition(collector).decode()
    names = set()
    for family in text_string_to_metric_families(text):
        names |= {family.name, *(sample.name for sample in family.samples)}
        if family.type == "counter":
            names.add(family.name + "_total")
    return names


def stem(name):
    """A metric's name without what its type adds."""
    return re.sub(r"(_total)?(_bucket|_sum|_count|_created)?$", "", name)


def dashboard():
    return json.loads((DOCS / "grafana" / "octavo.json").read_text())


def rules():
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return group["rules"]


def queries():
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [*panels, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("query", queries())
def test_queries_parse_and_name_metrics_that_exist(samples, query):
    promql_parser.parse(query.replace("$__rate_interval", "5m"))
    names = set(NAME.findall(query))
    assert names
    assert names <= samples


def test_the_dashboard_is_whole():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["targets"] and panel["title"] for panel in panels)


def test_alerts_are_complete_and_in_the_runbook():
    text = (DOCS / "operations.md").read_text()
    for rule in rules():
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in text


def test_the_runbook_names_metrics_that_exist_and_leaves_none_out(samples):
    named = set(NAME.findall((DOCS / "operations.md").read_text()))
    assert named <= samples
    assert {name for name in map(stem, samples) if NAME.match(name)} - set(
        map(stem, named)
    ) == set()


def test_every_endpoint_and_parameter_has_a_test_that_exists():
    rows = ROW.findall((DOCS / "api-coverage.md").read_text())
    for subject, file, test in rows:
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in defined, f"{subject}: {file}::{test}"
    subjects = {subject.strip("`") for subject, _, _ in rows}
    routes = [route for module in ROUTERS for route in module.router.routes]
    served = {f"{m} {r.path.replace(':path', '')}" for r in routes for m in r.methods}
    fields = {name for body in BODIES for name in body.model_fields}
    assert (served | fields) - subjects == set()


def test_the_image_is_pinned_and_has_a_user_of_its_own():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert images
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in images)
    assert any("-c constraints.txt" in line for line in lines)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] not in ("root", "0")


# Errors


def calls(name):
    """Calls of a function of this name anywhere in the server."""
    for path in sorted((ROOT / "serve").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "func", None)
            if getattr(called, "id", getattr(called, "attr", None)) == name:
                yield node


def constant(node):
    """The text or number that is written there, of an f-string its first words; else None."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) else None


def test_the_runbook_has_every_error_that_there_is():
    text = (DOCS / "operations.md").read_text()
    text = text[text.index("## What each error means") :]
    statuses, words = set(), {"invalid_request_error"}
    for name in ("ApiError", "_refuse"):
        for call in calls(name):
            statuses.add(constant(call.args[0]))
            words |= {constant(k.value) for k in call.keywords if k.arg in ("kind", "code")}
    statuses, words = statuses - {None}, words - {None}
    assert len(statuses) >= 12
    assert len(words) >= 16
    words |= {ApiError(status, "").anthropic_fields()["type"] for status in statuses}
    rows = re.findall(r"^\| ((?:\d{3}(?:, )?)+) \| (.*) \|$", text, re.MULTILINE)
    assert {int(s) for row, _ in rows for s in row.split(", ")} == statuses | {405}
    shown = {word for _, row in rows for word in re.findall(r"`([a-z_]+)`", row)}
    assert words <= shown


def test_the_runbook_has_every_reason_to_be_unavailable():
    text = (DOCS / "operations.md").read_text()
    said = [constant(call.args[0]) for call in calls("unavailable")]
    reasons = {words.split(":")[0] for words in said if words}
    assert len(reasons) >= 8
    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()
