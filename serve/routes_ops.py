"""Everything that doesn't generate: models, tokenize, health, version, metrics."""

from fastapi import APIRouter, Request, Response

from octavo.sampling.shown import shown
from octavo.serve import objects
from octavo.serve.bodies import parse_body, take
from octavo.serve.chat_plan import plan_chat
from octavo.serve.context import ServerContext, check_vocabulary, context_of, read_body
from octavo.serve.errors import invalid, unknown_model
from octavo.serve.metrics import exposition
from octavo.serve.openapi import request_schema
from octavo.serve.prompts import Prompt
from octavo.serve.tokenize_protocol import OF_MESSAGES, DetokenizeBody, TokenizeBody
from octavo.serve.wire import Ready

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


def _json(value: object, status: int = 200) -> Response:
    return Response(objects.to_json(value), status, media_type="application/json")


def _card(context: ServerContext, name: str, ready: Ready) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.engine_config.model,
        "parent": None,
        "max_model_len": ready.max_model_len,
    }


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    """The names this server answers to."""
    context = context_of(request)
    ready = context.require_ready()
    cards = [_card(context, name, ready) for name in context.names]
    return _json({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(request: Request, name: str) -> Response:
    """One of the names."""
    context = context_of(request)
    ready = context.require_ready()
    if name not in context.names:
        raise unknown_model(name, context.names)
    return _json(_card(context, name, ready))


@router.post("/tokenize", openapi_extra=request_schema(TokenizeBody), response_model=None)
async def tokenize(request: Request) -> Response:
    """Ids of a text, or of a conversation rendered by the chat template."""
    context = context_of(request)
    ready = context.require_ready()
    body, size = await take(request, _to_tokenize)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages, not both or none", "prompt")
    if body.messages is not None:
        prompt, _ = await plan_chat(context, body.chat().came_in(size), None)
    else:
        for name in OF_MESSAGES:
            if (value := getattr(body, name)) is not None:
                raise invalid(f"{name} goes with messages, not with a prompt: {shown(value)}", name)
        special = body.add_special_tokens is not False
        prompt = await context.encoder.text(body.prompt or "", special)
    return await context.off_loop(size, lambda: _tokens(context, ready, body, prompt))


def _to_tokenize(raw: bytes) -> tuple[TokenizeBody, int]:
    return parse_body(TokenizeBody, raw, any_extra=True), len(raw)


def _tokens(context: ServerContext, ready: Ready, body: TokenizeBody, prompt: Prompt) -> Response:
    answer: dict[str, object] = {
        "count": len(prompt.ids),
        "max_model_len": ready.max_model_len,
        "tokens": prompt.ids,
    }
    if body.return_token_strs:
        tokenizer = context.encoder.need_tokenizer("return_token_strs")
        answer["token_strs"] = [tokenizer.id_to_token(i) for i in prompt.ids]
    return _json(answer)


@router.post("/detokenize", openapi_extra=request_schema(DetokenizeBody), response_model=None)
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens spelled out."""
    context = context_of(request)
    ready = context.require_ready()
    raw = await read_body(request, context.config)
    text = await context.encoder.decoded(lambda: _ids(raw, context, ready), len(raw))
    return _json({"prompt": text})


def _ids(raw: bytes, context: ServerContext, ready: Ready) -> list[int]:
    """The ids in a body that asks for their text; millions take a while. ApiError 400 or 404."""
    body = parse_body(DetokenizeBody, raw, any_extra=True)
    context.check_model(body.model)
    if body.tokens:
        check_vocabulary(body.tokens, "tokens", ready.vocab_size)
    return body.tokens


@router.get("/health", response_model=None)
@router.get("/health/ready", response_model=None)
async def health(request: Request) -> Response:
    """200 while new requests are taken and steps end; 503 with the status otherwise."""
    status = context_of(request).status
    return _json({"status": status}, 200 if status == "ready" else 503)


@router.get("/health/live", response_model=None)
async def live(request: Request) -> Response:
    """503 when the server can't help itself: the engine keeps failing and is left alone."""
    status = context_of(request).status
    return _json({"status": status}, 503 if status == "failed" else 200)


@router.get("/", response_model=None)
async def root(request: Request) -> Response:
    """What this is, and where to go on."""
    return _json(
        {
            "name": "Octavo",
            "version": context_of(request).version,
            "documentation": "/docs",
            "health": "/health",
            "models": "/v1/models",
            "metrics": "/metrics",
        }
    )


@router.get("/version", response_model=None)
async def version(request: Request) -> Response:
    """What answers: version, settings, weights."""
    context = context_of(request)
    return _json(
        {
            "version": context.version,
            "model": context.client.state.model or context.engine_config.model,
            "config_hash": context.config_hash,
            "system_fingerprint": context.fingerprint,
            "weights_epoch": context.client.state.weights_epoch,
        }
    )


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    context = context_of(request)
    recorder = await context.total()
    collector, news = context.collector, context.client.news
    collector.recorder = recorder
    collector.stats = context.client.stats
    collector.up = context.status in ("ready", "paused", "draining")
    collector.restarts = news.restarts if news is not None else None
    return Response(exposition(collector), media_type=METRICS_TYPE)
