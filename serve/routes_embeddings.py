"""/v1/embeddings: the loaded decoder's final hidden states, pooled and scaled to length 1."""

import base64
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.sampling.shown import shown
from octavo.serve import errors, objects
from octavo.serve import types as engine
from octavo.serve.embedding import PROMPT_ONLY, check_pooling, unit_vector
from octavo.serve.prompt_only import (
    PromptBody,
    check_ids,
    enter,
    prompt_usage,
    run_prompts,
    schema,
)
from octavo.serve.types import TokenEvent

ENCODINGS = ("float", "base64")

router = APIRouter()


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings."""

    input: Any = None
    encoding_format: str | None = None
    pooling: str | None = None


@router.post("/v1/embeddings", openapi_extra=schema(EmbeddingBody), response_model=None)
async def embeddings(request: Request) -> Response:
    """One vector for each text or list of token ids in `input`."""
    context, ready, body = await enter(request, EmbeddingBody)
    encoding = body.encoding_format or "float"
    if encoding not in ENCODINGS:
        message = f"encoding_format must be float or base64, not {shown(encoding)}"
        raise errors.invalid(message, "encoding_format")
    pooling = body.pooling or context.config.pooling
    try:
        check_pooling(pooling)
    except ValueError as error:
        raise errors.invalid(str(error), "pooling") from None
    prompts = await context.encoder.several(
        body.input, "input", body.add_special_tokens is not False
    )
    answer = context.identity("embd-")
    for prompt in prompts:
        check_ids(prompt.ids, "input", ready)
    requests = [
        engine.Request(
            request_id=f"{answer.id}-{index}",
            prompt=prompt.ids,
            params=PROMPT_ONLY,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            pooling=pooling,
        )
        for index, prompt in enumerate(prompts)
    ]
    ends, epoch = await run_prompts(context, request, requests)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(end, encoding)}
        for index, end in enumerate(ends)
    ]
    fields = {
        **answer.under(epoch).fields("list"),
        "data": data,
        "usage": prompt_usage(requests, ends),
    }
    return Response(objects.to_json(fields), media_type="application/json")


def _encoded(end: TokenEvent, encoding: str) -> list[float] | str:
    if end.embedding is None:
        raise errors.internal("the engine sent no embedding")
    vector = unit_vector(end.embedding)
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
