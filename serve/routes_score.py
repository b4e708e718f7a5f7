"""/v1/score: log-probabilities of given continuations of one prompt."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from octavo.sampling.params import SamplingParams
from octavo.sampling.shown import shown
from octavo.serve import errors, objects
from octavo.serve import types as engine
from octavo.serve.context import ServerContext
from octavo.serve.objects import LOWEST_LOGPROB
from octavo.serve.prompt_only import (
    PromptBody,
    check_ids,
    enter,
    prompt_usage,
    run_prompts,
    schema,
)
from octavo.serve.types import TokenEvent
from octavo.serve.wire import Ready

MAX_TOKENS = 1 << 22
"""Of all continuations together, each with the prompt before it: few bytes can ask for billions."""

SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)

router = APIRouter()


class ScoreBody(PromptBody):
    """POST /v1/score; text_1 and text_2 are other names of prompt and continuations."""

    prompt: Any = None
    continuations: Any = None
    text_1: Any = None
    text_2: Any = None


@router.post("/v1/score", openapi_extra=schema(ScoreBody), response_model=None)
async def score(request: Request) -> Response:
    """For each continuation its tokens, their log-probabilities, the sum, and if it is greedy."""
    context, ready, body = await enter(request, ScoreBody)
    asked = _either(body, "prompt", "text_1"), _either(body, "continuations", "text_2")
    special = body.add_special_tokens is not False
    pairs = await _tokens(context, ready, *asked, special)
    name, other = (field.name for field in asked)
    answer = context.identity("score-")
    requests = []
    for index, (before, after) in enumerate(pairs):
        await asyncio.sleep(0)  # each takes milliseconds where the prompt is long
        check_ids(before, name, ready)
        check_ids(after, other, ready)
        check_ids((*before, *after), name, ready, "prompt and continuation")
        requests.append(
            engine.Request(
                request_id=f"{answer.id}-{index}",
                prompt=(*before, *after),
                params=SCORED,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
        )
    ends, epoch = await run_prompts(context, request, requests)
    data = [
        _scored(context, index, after, end)
        for index, ((_, after), end) in enumerate(zip(pairs, ends))
    ]
    fields = {
        **answer.under(epoch).fields("list"),
        "data": data,
        "usage": prompt_usage(requests, ends),
    }
    return Response(objects.to_json(fields), media_type="application/json")


class _Field(NamedTuple):
    """A value and the field it came in."""

    value: Any
    name: str


def _either(body: ScoreBody, name: str, other: str) -> _Field:
    value, alias = getattr(body, name), getattr(body, other)
    if (value is None) == (alias is None):
        raise errors.invalid(f"give either {name} or {other}, not both or none", name)
    return _Field(alias, other) if value is None else _Field(value, name)


async def _tokens(
    context: ServerContext, ready: Ready, prompt: _Field, continuations: _Field, special: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, continuation) as ids, for each continuation.

    Texts are encoded joined and cut after as many tokens as the prompt has alone, as evaluation
    harnesses do: a tokenizer may merge characters across the border.
    """
    before, *more = await context.encoder.split(*prompt)
    afters = await context.encoder.split(*continuations)
    if more:
        message = f"{prompt.name} must be one prompt, not {1 + len(more)}"
        raise errors.invalid(message, prompt.name)
    if any(isinstance(after, str) != isinstance(before, str) for after in afters):
        wrong = next(one for one in afters if isinstance(one, str) != isinstance(before, str))
        what = f"must be texts for a text, token ids for token ids, not {shown(wrong)}"
        raise errors.invalid(f"{continuations.name} {what}", continuations.name)
    if not isinstance(before, str):
        _check_total(len(before), prompt.name, len(afters))
        return [(tuple(before), tuple(after)) for after in afters if not isinstance(after, str)]
    alone = (await context.encoder.text(before, special)).ids
    check_ids(alone, prompt.name, ready)  # before it is encoded again with every continuation
    _check_total(len(alone), prompt.name, len(afters))
    pairs = []
    for after in afters:
        joined = (await context.encoder.text(f"{before}{after}", special)).ids
        pairs.append((joined[: len(alone)], joined[len(alone) :]))
    return pairs


def _check_total(tokens: int, name: str, times: int) -> None:
    if tokens * times > MAX_TOKENS:
        total = f"{times} continuations of {tokens} tokens are {times * tokens}"
        raise errors.invalid(f"{name}: {total}, at most {MAX_TOKENS}: send fewer at a time", name)


def _scored(
    context: ServerContext, index: int, after: Sequence[int], end: TokenEvent
) -> dict[str, Any]:
    entries = [entry for entry in (end.prompt_logprobs or ())[-len(after) :] if entry is not None]
    if len(entries) != len(after):
        raise errors.internal("the engine sent no log-probabilities")
    logprobs = [max(entry.logprob, LOWEST_LOGPROB) for entry in entries]
    table = context.table
    return {
        "object": "score",
        "index": index,
        "score": sum(logprobs),
        "token_ids": list(after),
        "tokens": [table.label(token) for token in after] if table else None,
        "token_logprobs": logprobs,
        "is_greedy": all(entry.rank == 1 for entry in entries),
    }
