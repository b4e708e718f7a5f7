"""What a caller may ask of sampling, validated once on the host. No jax here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 16
MAX_LOGIT_BIAS = 512
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to draw each next token, and when to stop.

    Attributes:
        max_tokens: tokens to generate at most, >= 0; None is "as many as the context holds".
        min_tokens: no stop id may be drawn before this many tokens, 0 .. max_tokens.
        temperature: 0 is greedy; otherwise (0, 100].
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the smallest set with this mass, (0, 1].
        min_p: keep tokens with at least this share of the likeliest one's probability, [0, 1].
        presence_penalty, frequency_penalty: subtracted for generated tokens, [-2, 2].
        repetition_penalty: divides (or multiplies, if negative) logits of tokens in prompt or
            output, (0, 10]; 1 is none.
        logit_bias: token id -> added to its logit, [-100, 100]; at most MAX_LOGIT_BIAS entries.
        bad_token_ids: never drawn. allowed_token_ids: only these are drawn; None is all.
        seed: 0 .. MAX_SEED; None draws one at admission.
        n: samples of the prompt, 1 .. 128.
        stop: strings that end the text, each non-empty, at most MAX_STOP_STRINGS.
        stop_token_ids: ids that end the sample beside end-of-sequence.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not stop at end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: None, or how many likeliest tokens to report beside the sampled one, 0 .. 20.
        prompt_logprobs: the same for the prompt's tokens.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
