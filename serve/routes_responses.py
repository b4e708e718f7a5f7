"""OpenAI's /v1/responses."""

from fastapi import APIRouter, Request, Response

from octavo.serve.answering import add_samples, answer
from octavo.serve.bodies import parse_body, take
from octavo.serve.chat_formats import PLAIN
from octavo.serve.chat_plan import plan_chat
from octavo.serve.choice import Wanted
from octavo.serve.context import context_of, visit_of
from octavo.serve.errors import in_words
from octavo.serve.openapi import request_schema
from octavo.serve.protocol import ChatBody, check_combinations
from octavo.serve.responses_generation import ResponsesGeneration
from octavo.serve.responses_protocol import CHAT_WORDS, ResponsesBody, chat_body, echoed
from octavo.serve.structured import Structured, structured_output

router = APIRouter()


@router.post("/v1/responses", openapi_extra=request_schema(ResponsesBody), response_model=None)
async def create_response(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    ready = context.require_ready()
    body, chat, structured = await take(request, _read)
    context.check_model(body.model)
    with in_words(CHAT_WORDS):
        prompt, plan = await plan_chat(context, chat, structured)
        plan = plan or PLAIN
        if plan.grammar is not None:
            structured = Structured(plan.grammar, "tools")
        wanted = Wanted(
            chat=True,
            logprobs=chat.top_logprobs_asked,
            timing=bool(body.return_timing),
            shown=plan.shown,
            structured=structured,
            thinking=plan.thinking,
        )
        identity = context.identity("resp_")
        visit = visit_of(request)
        parts = (context.client, context.recorder, context.table, identity, wanted, visit)
        job = ResponsesGeneration(*parts, plan, echoed(body))
        add_samples(job, chat, wanted, ready, [prompt], body.max_output_tokens, identity.id)
        return await answer(job, context, request, stream=bool(body.stream))


def _read(raw: bytes) -> tuple[ResponsesBody, ChatBody, Structured | None]:
    body = parse_body(ResponsesBody, raw)
    with in_words(CHAT_WORDS):
        chat = chat_body(body).came_in(len(raw))
        check_combinations(chat)
        return body, chat, structured_output(chat)
