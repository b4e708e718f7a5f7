"""Request bodies of the OpenAI API: which fields exist, their types, and what is refused.

Types are checked here (strictly: no "10" for 10); ranges of sampling fields are checked by
SamplingParams, prompts and messages by `prompts.py`, so that each message names field and range.
"""

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from octavo.sampling.params import (
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from octavo.sampling.shown import shown
from octavo.serve.errors import invalid

_OWN_ID = re.compile("[!-~]{1,128}")

MIN_INT32 = -MAX_INT32 - 1

# Accepted and without effect: they label, store or route, and change no token.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "guided_decoding_backend",
    }
)

_TOOLS = "functions are called through tools and tool_choice"
_TEXT_ONLY = "only text goes in and out"

# Known parameters that would change the answer, with the reason and the values that ask for
# nothing. A null always asks for nothing.
UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("none", "auto")),
    "suffix": ("text can't be inserted before a suffix", ()),
    "best_of": ("every sample is returned; use n", (1,)),
    "use_beam_search": ("beam search is not offered", (False,)),
    "length_penalty": ("beam search is not offered", (1, 1.0)),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "mm_processor_kwargs": (_TEXT_ONLY, ({},)),
    "prediction": ("predicted outputs are not offered", ()),
    "thinking_token_budget": ("reasoning is bounded in chats", ()),
    "verbosity": ("the model has no such control", ()),
    "web_search_options": ("the server has no web access", ()),
    "documents": ("pass documents in the messages", ([],)),
    "bad_words": ("ban tokens with logit_bias", ([],)),
    "prompt_embeds": ("prompts are text or token ids", ()),
    "spaces_between_special_tokens": ("the tokenizer decides", (True,)),
    "logits_processors": ("code in requests is not run", ([],)),
    "lora_request": ("a server has one model, without adapters", ()),
    "lora_path": ("a server has one model, without adapters", ()),
    "kv_transfer_params": ("prefill and decode run in one engine", ({},)),
    "ec_transfer_params": ("prefill and decode run in one engine", ({},)),
    "vllm_xargs": ("there are no extensions that could read them", ({},)),
    "media_io_kwargs": (_TEXT_ONLY, ({},)),
    "logprob_token_ids": ("the likeliest tokens are reported; use top_logprobs", ([],)),
    "truncation_side": ("the end of the prompt is kept", ("left",)),
    "repetition_detection": ("bound repetition with penalties", ({},)),
    "guided_whitespace_pattern": ("use structured_outputs with disable_any_whitespace", ()),
    "stream_interval": ("each event carries what is ready", (1,)),
    "return_prompt_text": ("use echo, or POST /tokenize", (False,)),
    "return_token_offsets": ("use logprobs, whose text_offset says it", (False,)),
    "watermarking": ("answers are not marked", (False,)),
    "echo": ("chat answers don't repeat the prompt", (False,)),
    "dimensions": ("this model's embeddings mean nothing when cut short", ()),
}


class StreamOptions(BaseModel):
    """What a stream reports beside text. Others are refused: each would change the stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# Bounded and given up at the first wrong item: each problem found takes a kilobyte to report.
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopTokens = Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)]


class StructuredBody(BaseModel):
    """What the text must be; `structured.py` reads it, at most one of these may ask for anything.

    Attributes:
        response_format: OpenAI's: text, json_object or json_schema.
        structured_outputs: vLLM's: one of json, json_object, regex, choice, grammar; and
            disable_any_whitespace beside the first two.
        guided_json, guided_regex, guided_choice, guided_grammar: older vLLM's.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    ignore_eos: bool | None = None


class SamplingBody(StructuredBody):
    """Fields that completions and chat share. None means the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: StopTokens | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timing: bool | None = None
    request_id: str | None = None

    @property
    def length_field(self) -> str:
        """The field that says how many tokens to generate at most."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage event: `usage` is where timing goes too."""
        asked = self.stream_options and self.stream_options.include_usage
        return bool(asked or self.return_timing)

    @property
    def counts_on(self) -> bool:
        """Whether every event of the stream says how much has been used until then."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def top_logprobs_asked(self) -> int | None:
        """Alternatives a token, None when no log-probabilities are wanted."""
        return self.logprobs


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    _bytes: int = PrivateAttr(default=0)

    @property
    def length_field(self) -> str:
        """The field that says how many tokens to generate at most."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def came_in(self, size: int) -> Self:
        """This body, read from so many bytes."""
        self._bytes = size
        return self

    @property
    def weight(self) -> int:
        """Bytes of the request; without limit where the request brings a template to run."""
        return sys.maxsize if self.chat_template is not None else self._bytes

    @property
    def top_logprobs_asked(self) -> int | None:
        """Alternatives a token, None when no log-probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


def sampling_params(
    body: CompletionBody | ChatBody,
    *,
    max_tokens: int,
    prompt_logprobs: int | None,
    vocab_size: int,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """SamplingParams of a body; ApiError 400 when a value is out of range.

    `defaults` are the model's own sampling values, used where the body is silent.
    """
    values = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values["max_tokens"] = max_tokens
    values["logprobs"] = body.top_logprobs_asked
    values["prompt_logprobs"] = prompt_logprobs
    if isinstance(body.stop, str):
        values["stop"] = (body.stop,)
    elif body.stop is not None:
        values["stop"] = tuple(body.stop)
    if body.top_k is not None:
        values["top_k"] = _top_k(body.top_k)
    if body.seed is not None:
        values["seed"] = _seed(body.seed)
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(body, name) is not None:
            values[name] = tuple(getattr(body, name))
    _check_ids(values, vocab_size)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise invalid(str(error), _field_named_in(str(error), body)) from None


_SAME_NAME = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def _top_k(top_k: int) -> int:
    """SamplingParams' value: -1 is another word for all."""
    if not -1 <= top_k <= MAX_INT32:
        raise invalid(f"top_k must be in -1 .. {MAX_INT32}, not {shown(top_k)}", "top_k")
    return max(top_k, 0)


def _seed(seed: int) -> int:
    """Fold the signed 64-bit seeds that clients send into SamplingParams' range."""
    if not -(2**63) <= seed < 2**63:
        raise invalid(f"seed must be in {-(2**63)} .. {MAX_SEED}, not {shown(seed)}", "seed")
    return seed & MAX_SEED


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        # One spelling for each id: "01" would overwrite "1".
        if len(key) > 10 or not key.isdecimal() or str(int(key)) != key:
            raise invalid(f"logit_bias keys must be token ids, not {shown(key)}", "logit_bias")
        bias[int(key)] = value
    return bias


def _check_ids(values: Mapping[str, Any], vocab_size: int) -> None:
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        for token_id in values.get(name) or ():
            if not 0 <= token_id < vocab_size:
                limit = f"token ids are 0 .. {vocab_size - 1}"
                raise invalid(f"{name}: {limit}, not {shown(token_id)}", name)


def _field_named_in(message: str, body: BaseModel) -> str | None:
    word = re.split(r"\W", message, maxsplit=1)[0]
    if word == "logprobs" and isinstance(body, ChatBody):
        return "top_logprobs"
    return word if word in type(body).model_fields else None


def check_combinations(body: CompletionBody | ChatBody) -> None:
    """Refuse fields that contradict each other; ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only accepted with stream=true", "stream_options")
    if body.counts_on and not body.include_usage:
        message = "stream_options.continuous_usage_stats needs include_usage=true"
        raise invalid(message, "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs can't be streamed", "prompt_logprobs")
    check_scheduling(body.priority, body.cache_salt)
    if body.request_id is not None and not _OWN_ID.fullmatch(body.request_id):
        limits = "1 .. 128 printable ASCII characters without blanks"
        raise invalid(f"request_id must be {limits}, not {shown(body.request_id)}", "request_id")
    if isinstance(body, ChatBody):
        _check_chat(body)


def check_scheduling(priority: int | None, cache_salt: str | None) -> None:
    """ApiError 400 unless the scheduler and the prefix cache can take these."""
    if cache_salt == "":
        raise invalid("cache_salt must not be empty: '' is no salt, leave it out", "cache_salt")
    if priority is not None and not MIN_INT32 <= priority <= MAX_INT32:
        limits = f"{MIN_INT32} .. {MAX_INT32}"
        raise invalid(f"priority must be in {limits}, not {shown(priority)}", "priority")


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs is not None:
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            message = f"top_logprobs must be 0 .. {MAX_LOGPROBS}, not {shown(body.top_logprobs)}"
            raise invalid(message, "top_logprobs")
    if body.add_generation_prompt and body.continue_final_message:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise invalid(message, "continue_final_message")
