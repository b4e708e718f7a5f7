"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from fastapi import APIRouter, Request, Response

from octavo.sampling.shown import shown
from octavo.serve import errors, objects
from octavo.serve.answering import add_samples, answer
from octavo.serve.bodies import parse_body, take
from octavo.serve.chat_formats import PLAIN
from octavo.serve.chat_plan import plan_chat
from octavo.serve.choice import Wanted
from octavo.serve.context import context_of, visit_of
from octavo.serve.errors import in_words
from octavo.serve.messages_generation import MessagesGeneration
from octavo.serve.messages_protocol import CHAT_WORDS, MessagesBody, chat_body
from octavo.serve.openapi import request_schema
from octavo.serve.protocol import ChatBody
from octavo.serve.structured import Structured

router = APIRouter()


def _read(raw: bytes) -> tuple[MessagesBody, ChatBody]:
    body = parse_body(MessagesBody, raw)
    with in_words(CHAT_WORDS):
        return body, chat_body(body).came_in(len(raw))


@router.post("/v1/messages", openapi_extra=request_schema(MessagesBody), response_model=None)
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    ready = context.require_ready()
    body, chat = await take(request, _read)
    context.check_model(body.model)
    if body.max_tokens is None or body.max_tokens < 1:
        message = f"max_tokens: an integer of at least 1 is required, not {shown(body.max_tokens)}"
        raise errors.invalid(message, "max_tokens")
    with in_words(CHAT_WORDS):
        prompt, plan = await plan_chat(context, chat, None)
        plan = plan or PLAIN
        structured = Structured(plan.grammar, "tools") if plan.grammar else None
        wanted = Wanted(
            chat=True,
            timing=bool(body.return_timing),
            shown=plan.shown,
            structured=structured,
            thinking=plan.thinking,
        )
        identity = context.identity("msg_")
        visit = visit_of(request)
        parts = (context.client, context.recorder, context.table, identity, wanted, visit)
        job = MessagesGeneration(*parts, plan)
        add_samples(job, chat, wanted, ready, [prompt], body.max_tokens, identity.id)
        return await answer(job, context, request, stream=bool(body.stream))


@router.post(
    "/v1/messages/count_tokens", openapi_extra=request_schema(MessagesBody), response_model=None
)
async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that a conversation makes."""
    context = context_of(request)
    context.require_ready()
    body, chat = await take(request, _read)
    context.check_model(body.model)
    with in_words(CHAT_WORDS):
        prompt, _ = await plan_chat(context, chat, None)
    return Response(
        objects.to_json({"input_tokens": len(prompt.ids)}), media_type="application/json"
    )
