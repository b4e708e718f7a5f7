"""Grammars to llguidance matchers, within limits. No jax.

llguidance bounds a grammar's size and what a compile or a mask may cost, by its own count.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.sampling.shown import cut
from octavo.serve.strict_json import strict_json
from octavo.serve.tokenizer import Tokenizer
from octavo.serve.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 30_000
"""At one or two kilobytes each; grammars people write take hundreds."""

NO_TOKENIZER = "this model has no tokenizer to follow a grammar with"
MAX_REASON, MAX_REASON_LINE = 600, 160
WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
"""What may stand between two tokens of JSON: enough to indent, too little to never come back."""


class GrammarError(ValueError):
    """A grammar that is refused; the message says why."""


class TooLong(GrammarError):
    """A grammar whose compile has not ended in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the grammar took longer than {seconds:g} s to compile")


class NoTrial(RuntimeError):
    """A grammar could not be tried, for which it is not to blame."""


def no_tokens() -> "LLTokenizer":
    """The tokens of an engine without a tokenizer: GrammarError."""
    raise GrammarError(NO_TOKENIZER)


@dataclass(frozen=True)
class TokenSource:
    """What llguidance makes the bytes of every token of.

    Attributes:
        text: the tokenizer, as the tokenizers library writes it.
        vocab_size: of the model; ids that the tokenizer lacks are never allowed.
        eos_id: ends a text.
    """

    text: str
    vocab_size: int
    eos_id: int

    def tokenizer(self) -> "LLTokenizer":
        """GrammarError for one with more tokens than the model, or whose bytes are not known."""
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self.text, self.vocab_size, self.eos_id)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer: {error}") from error


def token_source(
    load: Callable[[], Tokenizer | None], vocab_size: int, eos_ids: Sequence[int]
) -> TokenSource:
    """Of a model's tokenizer; GrammarError if it has none, or no end-of-sequence id."""
    tokenizer = load()
    if tokenizer is None:
        raise GrammarError(NO_TOKENIZER)
    if not eos_ids:
        raise GrammarError("this model has no end-of-sequence id to end a grammar with")
    return TokenSource(tokenizer.backend.to_str(), vocab_size, eos_ids[0])


def compile_grammar(tokenizer: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
    """A matcher at the start of `grammar`; GrammarError if it is malformed or too large, has
    features that are not supported, or allows no text at all."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # a lexer that is too large shows here
    if matcher.is_error():
        raise GrammarError(reason(matcher))
    return matcher


def reason(matcher: "LLMatcher") -> str:
    """Why a matcher is in error, without its internal state."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no text fits the grammar" if text.startswith("NoExtension") else shortened(text)


def refusal_of(error: BaseException) -> str:
    """What is said of a compile that raised."""
    if isinstance(error, GrammarError):
        return str(error)
    return f"{type(error).__name__}: {shortened(str(error))}"


def shortened(text: str) -> str:
    """A message without the bulk of the grammar that it quotes."""
    lines = [cut(line, MAX_REASON_LINE) for line in text.splitlines()]
    return cut("\n".join(lines), MAX_REASON)


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return _json_source({"type": "object"})
        case "json_schema":
            return _json_source(_parsed(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(_unanchored(grammar.text))
        case "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in _choices(grammar))
            return _lark_source(f"start: CHOICE\nCHOICE: {words}")
        case "lark":
            return _lark_source(grammar.text)


def _json_source(schema: object) -> str:
    from llguidance import LLMatcher

    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object or true")
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise GrammarError("x-guidance must be an object of llguidance's options")
    if options.get("whitespace_flexible") is False:  # a pattern would win over it
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})


def _lark_source(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _parsed(text: str) -> object:
    try:
        return strict_json(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None


def _choices(grammar: Grammar) -> list[str]:
    words = _parsed(grammar.text)
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise GrammarError("choices are a list of at least one text")
    return words


def _unanchored(pattern: str) -> str:
    """A regex without the ^ and $ around it, which say nothing where the whole text must match."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body
