"""What a caller may ask of sampling, validated once on the host. No jax here."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.sampling.shown import shown

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 16
MAX_LOGIT_BIAS = 512
MAX_SAMPLES = 128
MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1
MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: float32 logits divided by it leave only their maximum."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw each next token, and when to stop.

    Lists become tuples and numbers plain ints and floats; anything out of range, of another type
    (bools included) or contradictory raises ValueError naming the field, the value and the range.

    Attributes:
        max_tokens: tokens to generate at most, >= 0; None is "as many as the context holds".
        min_tokens: no stop id may be drawn before this many tokens, 0 .. max_tokens.
        temperature: below MIN_TEMPERATURE is greedy; at most 100.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the smallest set with this mass, (0, 1].
        min_p: keep tokens with at least this share of the likeliest one's probability, [0, 1].
        presence_penalty, frequency_penalty: subtracted for generated tokens, [-2, 2].
        repetition_penalty: divides (or multiplies, if negative) logits of tokens in prompt or
            output, (0, 10]; 1 is none.
        logit_bias: token id -> added to its logit, [-100, 100]; at most MAX_LOGIT_BIAS entries.
        bad_token_ids: never drawn. allowed_token_ids: only these are drawn; None is all.
        seed: 0 .. MAX_SEED; None draws one at admission.
        n: samples of the prompt, 1 .. MAX_SAMPLES.
        stop: strings that end the text, each non-empty, at most MAX_STOP_STRINGS.
        stop_token_ids: ids that end the sample beside end-of-sequence, at most MAX_STOP_TOKENS.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not stop at end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: None, or how many likeliest tokens to report beside the sampled one,
            0 .. MAX_LOGPROBS.
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

    def __post_init__(self) -> None:
        for name, (low, high) in _INT_RANGES.items():
            self._set(name, _integer(name, getattr(self, name), low, high))
        for name, (low, high) in _OPTIONAL_INT_RANGES.items():
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), low, high))
        for name, (low, high, low_included) in _FLOAT_RANGES.items():
            self._set(name, _real(name, getattr(self, name), low, high, low_included))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {shown(getattr(self, name))}")
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_token_ids", _token_ids("bad_token_ids", self.bad_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKENS}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be in 0 .. max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one token, got none")
        if not set(self.allowed_token_ids) - set(self.bad_token_ids):
            raise ValueError("bad_token_ids bans every token of allowed_token_ids")

    def resolved(self, max_tokens: int, seed: int) -> "SamplingParams":
        """A copy with the two fields that admission fills in, in range as admission makes them.

        The others were looked at when this was made, and `replace` would do so again: half of what
        it takes to admit a request. ValueError if min_tokens exceeds max_tokens.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._set("max_tokens", max_tokens)
        copy._set("seed", seed)
        copy._check_together()
        return copy

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the argmax of the transformed logits."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p may remove a token from a random draw."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def has_bias(self) -> bool:
        """Whether tokens are biased, banned or the only ones allowed."""
        return bool(self.logit_bias or self.bad_token_ids) or self.allowed_token_ids is not None

    @property
    def needs_state(self) -> bool:
        """Whether the request's row slot on the device must be reset before it samples."""
        return self.has_penalties or self.has_bias

    @property
    def is_plain(self) -> bool:
        """Whether the lean programs serve it (greedy, or random with filters).

        Only such rows run several decode steps in one dispatch: each further kind of sampling
        would need its own compile of the whole model.
        """
        return not self.needs_state and self.min_tokens == 0 and self.logprobs is None


_INT_RANGES = {
    "min_tokens": (0, MAX_INT32),
    "top_k": (0, MAX_INT32),
    "n": (1, MAX_SAMPLES),
}
_OPTIONAL_INT_RANGES = {
    "max_tokens": (0, MAX_INT32),
    "seed": (0, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_FLOAT_RANGES = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 10.0, False),
}


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer in {low} .. {high}, got {shown(value)}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be in {low} .. {high}, got {shown(value)}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float, low_included: bool = True) -> float:
    span = f"{'[' if low_included else '('}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in {span}, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if math.isnan(number) or not low <= number <= high or (number == low and not low_included):
        raise ValueError(f"{name} must be in {span}, got {shown(value)}")
    return number


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{name} must be a string or a list of strings, got {shown(value)}")
    if len(items) > MAX_STOP_STRINGS:
        raise ValueError(f"{name} has {len(items)} entries, at most {MAX_STOP_STRINGS}")
    if not all(items):
        raise ValueError(f"{name} must not hold an empty string, got {shown(value)}")
    return tuple(items)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(_integer(f"{name}[{i}]", item, 0, MAX_INT32 - 1) for i, item in enumerate(value))


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIAS}")
    return {
        _integer("logit_bias's token id", token, 0, MAX_INT32 - 1): _real(
            f"logit_bias[{shown(token)}]", bias, -100.0, 100.0
        )
        for token, bias in value.items()
    }
