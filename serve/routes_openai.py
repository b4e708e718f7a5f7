"""/v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from octavo.serve import errors
from octavo.serve.answering import add_samples, answer
from octavo.serve.bodies import parse_body, take
from octavo.serve.chat_formats import AnswerPlan
from octavo.serve.chat_plan import plan_chat
from octavo.serve.choice import Wanted
from octavo.serve.context import ServerContext, context_of, visit_of
from octavo.serve.generation import Generation
from octavo.serve.openapi import request_schema
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import ChatBody, CompletionBody, check_combinations
from octavo.serve.split_generation import SplitGeneration
from octavo.serve.structured import Structured, structured_output
from octavo.serve.wire import Ready

router = APIRouter()


@router.post("/v1/completions", openapi_extra=request_schema(CompletionBody), response_model=None)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    context = context_of(request)
    ready = context.require_ready()
    body, structured = await take(request, _completion)
    context.check_model(body.model)
    wanted = Wanted(
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=bool(body.echo),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage=body.include_usage,
        counting=body.counts_on,
        timing=bool(body.return_timing),
        structured=structured,
    )
    _need_text(context, body, wanted)
    prompts = await context.encoder.completion(body)
    asked = body.max_tokens
    return await _generate(context, request, body, wanted, ready, prompts, asked)


@router.post("/v1/chat/completions", openapi_extra=request_schema(ChatBody), response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    ready = context.require_ready()
    body, structured = await take(request, _chat)
    context.check_model(body.model)
    prompt, plan = await plan_chat(context, body, structured)
    if plan is not None and plan.grammar is not None:
        structured = Structured(plan.grammar, "tools")
    wanted = Wanted(
        chat=True,
        logprobs=body.top_logprobs_asked,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage=body.include_usage,
        counting=body.counts_on,
        timing=bool(body.return_timing),
        shown=plan.shown if plan else frozenset(),
        structured=structured,
        thinking=plan.thinking if plan else None,
    )
    asked: int | None = getattr(body, body.length_field)
    if asked == 0:
        name = body.length_field
        raise errors.invalid(f"{name} must be at least 1 in a chat, not 0", name)
    return await _generate(context, request, body, wanted, ready, [prompt], asked, plan)


def _completion(raw: bytes) -> tuple[CompletionBody, Structured | None]:
    body = parse_body(CompletionBody, raw)
    check_combinations(body)
    return body, structured_output(body)


def _chat(raw: bytes) -> tuple[ChatBody, Structured | None]:
    body = parse_body(ChatBody, raw).came_in(len(raw))
    check_combinations(body)
    return body, structured_output(body)


def _need_text(context: ServerContext, body: CompletionBody, wanted: Wanted) -> None:
    """Without a tokenizer only ids come out, so they must be asked for and nothing else."""
    if context.encoder.tokenizer is not None:
        return
    if not wanted.token_ids:
        message = "return_token_ids must be true: this model has no tokenizer to make text with"
        raise errors.invalid(message, "return_token_ids")
    for name in ("echo", "stop", "logprobs"):
        if getattr(body, name) not in (None, False, [], ""):
            raise errors.invalid(f"{name}: this model has no tokenizer", name)


async def _generate(
    context: ServerContext,
    request: Request,
    body: CompletionBody | ChatBody,
    wanted: Wanted,
    ready: Ready,
    prompts: list[Prompt],
    max_tokens: int | None,
    plan: AnswerPlan | None = None,
) -> Response:
    """Run the samples and answer, as one JSON object or as a stream."""
    prefix = "chatcmpl-" if wanted.chat else "cmpl-"
    identity = context.identity(prefix, body.request_id)
    unique = context.identity(prefix).id  # two requests may have the same id of their clients
    parts = (context.client, context.recorder, context.table, identity, wanted, visit_of(request))
    job = SplitGeneration(*parts, plan) if plan else Generation(*parts)
    add_samples(job, body, wanted, ready, prompts, max_tokens, unique)
    return await answer(job, context, request, stream=bool(body.stream))
