"""Dashboard, alert rules, runbook and coverage table against what the server really has."""

import ast
import asyncio
import json
import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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
    tokenize_protocol,
)
from octavo.serve.absent import ABSENT
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
    tokenize_protocol.TokenizeBody,
    tokenize_protocol.DetokenizeBody,
    responses_protocol.ResponsesBody,
    messages_protocol.MessagesBody,
    routes_embeddings.EmbeddingBody,
    routes_score.ScoreBody,
    routes_admin.ReloadBody,
)
FIELDS = {name for body in BODIES for name in body.model_fields} | set(routes_admin.PAUSE_DEFAULTS)
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


def rows():
    """(subject, file, test) of every row of the coverage table."""
    found = ROW.findall((DOCS / "api-coverage.md").read_text())
    return [(subject.strip("`"), file, test) for subject, file, test in found]


def test_every_endpoint_and_parameter_has_a_row():
    routes = [route for module in ROUTERS for route in module.router.routes]
    served = {f"{m} {r.path.replace(':path', '')}" for r in routes for m in r.methods}
    assert (served | FIELDS) - {subject for subject, _, _ in rows()} == set()


@pytest.mark.parametrize("file", sorted({file for _, file, _ in rows()}))
def test_the_named_tests_exist_and_concern_the_fields(file):
    source = (ROOT / file).read_text()
    defined = {name: node for node in ast.parse(source).body for name in names_of(node)}
    for subject, _, test in [row for row in rows() if row[1] == file]:
        assert test in defined, f"{subject}: {file}::{test}"
        if subject in FIELDS:
            text = "\n".join(whole(test, defined, source))
            assert re.search(rf"\b{subject}\b", text), f"{subject}: {file}::{test}"


def test_what_is_missing_is_listed():
    missing = (DOCS / "api-coverage.md").read_text().split("## Missing")[1]
    assert [path for path in ABSENT if f"`{path}" not in missing and path != "/v1/responses"] == []
    assert "`GET /v1/responses/{id}`" in missing
    refused = (DOCS / "serving.md").read_text().split("## What is refused")[1].split("\n## ")[0]
    assert [name for name in protocol.UNSUPPORTED if f"`{name}`" not in refused] == []


def names_of(node):
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def whole(name, defined, source):
    """The source of `name`, and of the module's own tables and helpers that it is made of."""
    todo, seen = [name], set()
    while todo:
        node = defined[todo.pop()]
        if node in seen:
            continue
        seen.add(node)
        for part in (node, *getattr(node, "decorator_list", ())):
            yield ast.get_source_segment(source, part)
        used = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        todo += used & defined.keys()


def dockerfile():
    """Instructions of the image's last stage, and of those before it."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    stages = [i for i, line in enumerate(lines) if line.startswith("FROM ")]
    return lines[stages[-1] :], lines[: stages[-1]]


def test_the_image_is_pinned():
    last, before = dockerfile()
    images = [line.split()[1] for line in before + last if line.startswith("FROM ")]
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in images)
    # As a variable: the option does not reach what pip builds the package with.
    assert before.index("ENV PIP_CONSTRAINT=/src/constraints.txt") < len(before) - 1
    (install,) = re.findall(r"pip install .*\[(.*)\]", before[-1])
    assert install == "serve,cuda13,tracing"


def test_what_the_image_installs_is_in_the_constraints():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    wanted += [one for extra in ("serve", "cuda13", "tracing") for one in extras[extra]]
    wanted += [r for r in requires("jax") if Requirement(r).marker and "cuda13" in r]
    for one in map(Requirement, wanted):
        if one.marker is None or one.marker.evaluate({"extra": "cuda13"}):
            assert one.specifier.contains(pinned[canonicalize_name(one.name)]), one
    assert pinned["jax-cuda13-plugin"] == pinned["jaxlib"]
    assert sum(name.startswith("nvidia-") for name in pinned) >= 15


def test_the_image_runs_as_nobody_in_particular_and_hears_signals():
    last, _ = dockerfile()
    by_name = dict(line.split(maxsplit=1) for line in last)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", by_name["USER"])  # Kubernetes wants a number
    assert json.loads(by_name["ENTRYPOINT"])[-1] == "serve"  # no shell that keeps SIGTERM to itself
    assert by_name["STOPSIGNAL"] == "SIGTERM"
    (probe,) = re.findall(r"CMD (\[.*\])$", by_name["HEALTHCHECK"])
    assert "/health/live" in json.loads(probe)[-1]
    # The volume takes its owner from the folder, which its user must have made before.
    names = [line for line in last if line.startswith(("USER", "RUN mkdir", "VOLUME"))]
    assert [line.split()[0] for line in names] == ["USER", "RUN", "VOLUME"]
    assert names[1].split()[-1] == names[2].split()[-1] == "/home/octavo/.cache"


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
    for call in calls("ApiError"):
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


def test_the_runbooks_lines_are_logged():
    text = (DOCS / "operations.md").read_text()
    table = text[text.index("| line that begins so |") : text.index("## What each error means")]
    lines = re.findall(
        r"`([^`]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row)
    )
    logged = [
        c for kind in ("info", "warning", "error", "exception") for c in calls(kind) if c.args
    ]
    said = [words for call in logged if isinstance(words := constant(call.args[0]), str)]
    assert len(lines) >= 11
    assert [line for line in lines if not any(words.startswith(line) for words in said)] == []
