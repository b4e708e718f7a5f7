"""How the served model writes tool calls and reasoning, and which parsers an answer needs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.serve.answer_parser import AnswerParser, new_call_id, short_call_id
from octavo.serve.answer_splitter import AnswerSplitter
from octavo.serve.config import AUTO, ServerConfig
from octavo.serve.detokenize import TokenTable
from octavo.serve.errors import invalid
from octavo.serve.prompts import Tokenizer
from octavo.serve.reasoning import OPEN as THINK
from octavo.serve.reasoning import ThinkParser
from octavo.serve.required_calls import RequiredCalls
from octavo.serve.thinking import Thinking
from octavo.serve.tool_formats import (
    ForcedCallParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)
from octavo.serve.tool_prompt import shows_tools
from octavo.serve.tool_pythonic import PythonicParser
from octavo.serve.tool_request import ToolUse
from octavo.serve.types import Grammar

MAX_REQUIRED_CALLS = 8

_PARSERS: Mapping[str, type[AnswerParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
# What a template that asks for a format says; the first that fits counts. Dialects that share a
# tag with another format and are not read come before it.
_SIGNS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("<function=", "<arg_key>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("func_name1(", "func_name(")),
    ("llama3_json", ("<|python_tag|>", '"parameters":')),
)


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """What the served model's answers are made of.

    Attributes:
        tools: name of the tool format, None if calls aren't read.
        reasoning: answers may begin with a think block.
        shown_tools, shown_reasoning: ids of special tokens that the parsers must see in the text.
    """

    tools: str | None = None
    reasoning: bool = False
    shown_tools: frozenset[int] = frozenset()
    shown_reasoning: frozenset[int] = frozenset()


def chat_formats(config: ServerConfig, tokenizer: Tokenizer, table: TokenTable) -> ChatFormats:
    """The formats that the settings name, or that the chat template shows where they say auto."""
    tools = _tool_format(config.tool_parser, tokenizer.tool_template or "")
    reasoning = config.reasoning_parser == "think"
    if config.reasoning_parser == AUTO:
        reasoning = THINK in (tokenizer.chat_template or "")
    return ChatFormats(
        tools,
        reasoning,
        _special(table, _PARSERS[tools].markers if tools else ()),
        _special(table, ThinkParser.markers if reasoning else ()),
    )


def _special(table: TokenTable, markers: tuple[str, ...]) -> frozenset[int]:
    if not markers:
        return frozenset()
    return frozenset(i for i in table.special_ids if table.label(i) in markers)


def _tool_format(setting: str, template: str) -> str | None:
    if setting != AUTO:
        return None if setting == "none" else setting
    if not shows_tools(template):  # it is told about tools in Hermes' form
        return "hermes"
    return next((name for name, signs in _SIGNS if any(s in template for s in signs)), None)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers to one request are read.

    Attributes:
        shown: ids of special tokens that must be spelled out.
        grammar: what a required or forced call has to look like.
        forced: the tool choice named the function.
        reasoning: reasoning is taken out and counted.
        thinking: a bound for it, None for none.
        splitter: makes the splitter of one sample.
    """

    shown: frozenset[int]
    grammar: Grammar | None
    forced: bool
    reasoning: bool
    splitter: Callable[[], AnswerSplitter]
    thinking: Thinking | None = None


PLAIN = AnswerPlan(frozenset(), None, False, False, lambda: AnswerSplitter(None, None))
"""Answers that are all content."""


def answer_plan(
    formats: ChatFormats,
    use: ToolUse | None,
    *,
    constrained: bool,
    opened: bool,
    include_reasoning: bool,
) -> AnswerPlan | None:
    """What the answers need; None when they are plain content. ApiError 400.

    `constrained` says that a grammar rules the text from its first token, which leaves no room for
    reasoning; `opened` that the prompt ends inside a think block.
    """
    grammar = tool_grammar(formats.tools, use) if use else None
    reasoning = formats.reasoning and grammar is None and not constrained
    if use is None and not reasoning:
        return None
    make_tools = _tool_parser(formats.tools, use) if use else None

    def splitter() -> AnswerSplitter:
        return AnswerSplitter(
            ThinkParser(opened=opened) if reasoning else None,
            make_tools() if make_tools else None,
            keep_reasoning=include_reasoning,
        )

    shown = formats.shown_tools if use else frozenset[int]()
    shown |= formats.shown_reasoning if reasoning else frozenset()
    return AnswerPlan(shown, grammar, bool(use and use.forced), reasoning, splitter)


def _tool_parser(
    name: str | None, use: ToolUse
) -> Callable[[], AnswerParser] | Callable[[], RequiredCalls]:
    if use.forced is not None:
        forced = use.forced
        make_id = short_call_id if name == "mistral" else new_call_id
        return lambda: ForcedCallParser(forced, make_id)
    limit = None if use.parallel else 1
    if use.required:
        return lambda: RequiredCalls(_required_parser(_required_format(name), use, limit))
    if name is None:
        message = "tools: how this model calls tools is not known; see the setting tool_parser"
        raise invalid(message, "tools")
    kind = _PARSERS[name]
    return lambda: kind(use.schemas, max_calls=limit)


def _required_parser(name: str, use: ToolUse, limit: int | None) -> AnswerParser:
    if name == "mistral":
        return MistralParser(use.schemas, max_calls=limit, announced=True)
    return _PARSERS[name](use.schemas, max_calls=limit)


def _required_format(name: str | None) -> str:
    return name if name in ("hermes", "mistral") else "llama3_json"


# Before, between and behind the calls, and a call's own text around name and arguments.
_SHAPES: Mapping[str, tuple[str, str, str, str, str]] = {
    "hermes": ("", "\n", "", '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
    "mistral": ("[", ", ", "]", '{"name": "%s", "arguments": ', "}"),
    "llama3_json": ("", "; ", "", '{"name": "%s", "parameters": ', "}"),
}


def tool_grammar(name: str | None, use: ToolUse) -> Grammar | None:
    """The grammar that makes an answer the calls that were asked for; None if it may be text."""
    if use.forced is not None:
        return Grammar.json_schema(use.schemas[use.forced])
    if not use.required:
        return None
    start, between, end, head, tail = _SHAPES[_required_format(name)]
    more = f" ({json.dumps(between)} call){{0,{MAX_REQUIRED_CALLS - 1}}}" if use.parallel else ""
    around = [json.dumps(text) + " " if text else "" for text in (start, end)]
    lines = [f"start: {around[0]}call{more} {around[1]}".rstrip()]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(use.schemas))))
    for i, (function, schema) in enumerate(use.schemas.items()):
        lines.append(f"call_{i}: {json.dumps(head % function)} args_{i} {json.dumps(tail)}")
        lines.append(f"args_{i}: %json {json.dumps(schema)}")
    return Grammar("lark", "\n".join(lines) + "\n")
