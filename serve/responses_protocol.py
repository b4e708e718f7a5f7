"""OpenAI's /v1/responses: its body, and the chat request that means the same."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.sampling.shown import shown
from octavo.serve.errors import invalid, unsupported
from octavo.serve.protocol import ChatBody, StopStrings
from octavo.serve.responses_input import input_messages

MAX_METADATA = 16

_STATELESS = "no answer is kept on the server; send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_NEEDS = f'include: ["{_LOGPROBS}"]'


class ResponsesStreamOptions(BaseModel):
    """Nothing pads the stream here, so whether it may is all the same."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool | None = None


class ResponsesBody(BaseModel):
    """POST /v1/responses. None means the default.

    From `top_k` on they are ours and vLLM's: the same as in a chat.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Any = None
    reasoning: Any = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | StopStrings | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    return_timing: bool | None = None

    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
        "previous_response_id": (_STATELESS, ()),
        "conversation": (_STATELESS, ()),
        "store": (f"send false: {_STATELESS}", (False,)),
        "background": (_STATELESS, (False,)),
        "prompt": ("prompt templates are not kept; send instructions and input", ()),
        "max_tool_calls": ("it counts built-in tools, of which there are none", ()),
        "truncation": ("an input over the context is refused, never cut", ("disabled",)),
        "context_management": ("the input is taken as it is", ([],)),
    }


_SAME_NAME = (
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "thinking_token_budget",
)


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request to /v1/chat/completions; ApiError 400 naming the field at fault."""
    _check(body)
    messages = input_messages(body.input)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return ChatBody(
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=_effort(body.reasoning),
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs or None,
        **{name: getattr(body, name) for name in _SAME_NAME},
    )


def echoed(body: ResponsesBody) -> dict[str, Any]:
    """What an answer repeats of its request."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": _effort(body.reasoning), "summary": None},
        "store": False,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }


def _check(body: ResponsesBody) -> None:
    most = body.max_output_tokens
    if most is not None and most < 1:
        raise invalid(
            f"max_output_tokens must be at least 1, not {shown(most)}", "max_output_tokens"
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only accepted with stream=true", "stream_options")
    for asked in body.include or ():
        if asked not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise unsupported("include", f"there is no {shown(asked)} to include")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(f"{where} must be an object, not {shown(tool)}", where)
    if tool.get("type") != "function":
        message = f"{where}.type must be 'function', not {shown(tool.get('type') or tool)}"
        raise invalid(f"{message}: there are no built-in tools", f"{where}.type")
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = choice.get("type") or choice
        message = f"tool_choice.type must be 'function', not {shown(kind)}"
        raise invalid(message, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(text: Any) -> Any:
    """`text` as response_format."""
    for key, value in _object(text, "text").items():
        if key == "verbosity" and value not in (None, "medium"):
            raise unsupported("text.verbosity", "the model has no such control")
        if key not in ("format", "verbosity"):
            raise invalid(f"text.{key} is not offered; known: format", "text")
    shape = (text or {}).get("format")
    if not isinstance(shape, dict) or shape.get("type") != "json_schema":
        return shape
    rest = {key: value for key, value in shape.items() if key != "type"}
    return {"type": "json_schema", "json_schema": rest}


def _effort(reasoning: Any) -> Any:
    """The effort asked for; a summary, which would need a model of its own, is refused."""
    asked = _object(reasoning, "reasoning")
    for key, value in asked.items():
        if key in ("summary", "generate_summary") and value not in (None, "auto"):
            raise unsupported(f"reasoning.{key}", "the reasoning itself comes out, unabridged")
        if key not in ("effort", "summary", "generate_summary") and value is not None:
            raise invalid(f"reasoning.{key} is not offered; known: effort, summary", "reasoning")
    effort = asked.get("effort")
    if not isinstance(effort, str | None):
        raise invalid(f"reasoning.effort must be a string, not {shown(effort)}", "reasoning")
    return effort


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{name} must be an object, not {shown(value)}", name)
    return value or {}


CHAT_WORDS = {
    r"\bresponse_format(\.json_schema)?\b": "text.format",
    r"\bmax_tokens\b": "max_output_tokens",
    r"\bmessages\b": "input",
    r"\breasoning_effort\b": "reasoning.effort",
    r"\blogprobs=true": _NEEDS,
    r"(tools\[\d+\])\.function\b": r"\1",
}
"""Fields of the chat request as the caller knows them: see errors.in_words."""
