"""The documentation against the code: links, snippets, settings, endpoints, request fields."""

import dataclasses
import re
from pathlib import Path

import pytest

from octavo.model.checkpoint.gguf_file import BLOCK_TYPES
from octavo.model.config import ROPE_KINDS
from octavo.model.families import FAMILIES
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
from octavo.serve.cli import COMMANDS
from octavo.serve.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = [field for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)]
ROUTERS = (
    routes_admin,
    routes_embeddings,
    routes_messages,
    routes_openai,
    routes_ops,
    routes_responses,
    routes_score,
)
ROUTES = [route for module in ROUTERS for route in module.router.routes]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    for link in LINK.findall(page.read_text()):
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link.split("#")[0]).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_compile(page):
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        compile(code, f"{page.name}, snippet {index}", "exec")


@pytest.mark.parametrize("field", SETTINGS, ids=lambda field: field.name)
def test_every_setting_is_documented(field):
    row = f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |"
    assert row in text_of("docs/configuration.md"), row


def test_no_other_setting_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", text_of("docs/configuration.md"), re.MULTILINE)
    assert rows == [field.name for field in SETTINGS]


def test_every_endpoint_is_documented():
    documented = set(re.findall(r"`(GET|POST) ([^`]+)`", text_of("docs/serving.md")))
    served = {
        (method, route.path.replace(":path", "")) for route in ROUTES for method in route.methods
    }
    assert documented == served


@pytest.mark.parametrize(
    "names",
    [
        protocol.CompletionBody.model_fields,
        protocol.ChatBody.model_fields,
        messages_protocol.MessagesBody.model_fields,
        responses_protocol.ResponsesBody.model_fields,
        responses_protocol.ResponsesBody.refused,
        routes_embeddings.EmbeddingBody.model_fields,
        routes_score.ScoreBody.model_fields,
        protocol.HARMLESS,
        protocol.UNSUPPORTED,
    ],
    ids=[
        "completions",
        "chat",
        "messages",
        "responses",
        "refused",
        "embeddings",
        "score",
        "harmless",
        "unsupported",
    ],
)
def test_every_request_field_is_documented(names):
    text = text_of("docs/serving.md")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_models_formats_and_ropes_are_documented():
    text = text_of("docs/models.md")
    names = [*FAMILIES, *ROPE_KINDS, *(kind.name for kind in BLOCK_TYPES.values())]
    assert [name for name in names if name not in text] == []


def test_readme_names_every_command_and_folder():
    text = text_of("README.md")
    assert [name for name in COMMANDS if f"octavo {name}" not in text] == []
    folders = ("octavo", "model", "attention", "cache", "sampling", "serve", "configs", "bench")
    assert [name for name in folders if f"`{name}/`" not in text] == []
