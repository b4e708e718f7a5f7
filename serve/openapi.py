"""Request bodies in the OpenAPI document: they are parsed by hand, so FastAPI doesn't see them."""

from typing import Any

from pydantic import BaseModel


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}


def request_schema(kind: type[BaseModel]) -> dict[str, object]:
    """The body's JSON schema for the OpenAPI document, with nested models written in place."""
    schema = kind.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
