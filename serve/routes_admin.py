"""For operators: pause, other weights, an empty prefix cache; only where admin_endpoints is set."""

import time
from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from octavo.sampling.shown import shown
from octavo.serve import errors, objects
from octavo.serve.bodies import parse_body, take
from octavo.serve.context import ServerContext, context_of, read_body
from octavo.serve.openapi import request_schema

PAUSES = ("abort", "wait", "keep")
RELOADS = ("wait", "abort")
PAUSE_DEFAULTS = {"mode": "abort", "clear_cache": "true"}
"""Query parameters of a pause."""

router = APIRouter()


class ReloadBody(BaseModel):
    """POST /reload_weights. `path`: a model like the present one; None reads that one again."""

    model_config = ConfigDict(strict=True, extra="ignore")

    path: str | None = None
    mode: str | None = None


def _context(request: Request, *, draining: bool = False) -> ServerContext:
    """The server's state; ApiError 403 where nobody is an operator, 503 without an engine.

    And while it drains, unless `draining` orders are taken too.
    """
    context = context_of(request)
    if not context.config.admin_endpoints:
        raise errors.forbidden("this server takes no orders by HTTP: see admin_endpoints")
    if not (draining and context.status == "draining"):
        context.require_ready()
    return context


def _json(value: object) -> Response:
    return Response(objects.to_json(value), media_type="application/json")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise errors.invalid(f"{name} must be one of {', '.join(known)}, not {shown(value)}", name)
    return value


async def _asked(request: Request, defaults: Mapping[str, str]) -> dict[str, str]:
    """The query parameters of an order that takes no body, of which these are known; ApiError 400.

    A pause that overlooked a mode in a body would end requests that were to be kept.
    """
    body = await read_body(request, context_of(request).config)
    if body.strip() not in (b"", b"{}"):
        known = " and ".join(defaults) or "there are none"
        raise errors.invalid(f"the order takes no body, but query parameters: {known}")
    return _query(request, defaults)


def _query(request: Request, defaults: Mapping[str, str]) -> dict[str, str]:
    """The query parameters of a request, of which these are known; ApiError 400."""
    asked = {**defaults, **request.query_params}
    for name in asked:
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise errors.invalid(f"unknown parameter {shown(name)}; known: {known}", name[:80])
    return asked


@router.post("/pause", response_model=None)
async def pause(request: Request) -> Response:
    """Let no request go on; `mode` and `clear_cache` are query parameters, as with vLLM."""
    context = _context(request)
    asked = await _asked(request, PAUSE_DEFAULTS)
    mode = _one_of("mode", asked["mode"], PAUSES)
    clear = _one_of("clear_cache", asked["clear_cache"].lower(), ("true", "false")) == "true"
    await context.client.control("pause", mode=mode, clear_cache=clear)
    return _json({"status": "paused", "mode": mode})


@router.post("/resume", response_model=None)
async def resume(request: Request) -> Response:
    """End a pause; a drain's as well, which waits for requests that the pause holds back."""
    context = _context(request, draining=True)
    await _asked(request, {})
    await context.client.control("resume")
    return _json({"status": "resumed"})


@router.get("/is_paused", response_model=None)
async def is_paused(request: Request) -> Response:
    """Whether requests wait for a resume."""
    context = _context(request)
    _query(request, {})
    return _json({"is_paused": context.client.state.paused})


@router.post("/reset_prefix_cache", response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Share nothing with later requests that was computed until now; what runs goes on."""
    context = _context(request)
    await _asked(request, {})
    await context.client.control("forget")
    return _json({"status": "reset"})


@router.post("/reload_weights", openapi_extra=request_schema(ReloadBody), response_model=None)
async def reload_weights(request: Request) -> Response:
    """Replace the weights in place."""
    context = _context(request)
    _query(request, {})
    body = await take(request, lambda raw: parse_body(ReloadBody, raw or b"{}"))
    mode = _one_of("mode", body.mode or RELOADS[0], RELOADS)
    start = time.monotonic()
    done = await context.client.control("reload", model=body.path or "", mode=mode)
    return _json(
        {
            "status": "reloaded",
            "weights_epoch": done.weights_epoch,
            "system_fingerprint": context.fingerprint,
            "seconds": round(time.monotonic() - start, 3),
        }
    )
