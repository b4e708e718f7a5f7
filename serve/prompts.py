"""Prompts of a request as token ids: checked, rendered and encoded off the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.sampling.shown import shown
from octavo.serve.detokenize import TextDecoder
from octavo.serve.errors import ApiError, invalid
from octavo.serve.protocol import ChatBody, CompletionBody
from octavo.serve.strict_json import strict_json
from octavo.serve.tool_request import ToolUse

MAX_PROMPTS = 2048
SEVERAL = 8192
"""Items that are looked at on the event loop, at most."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SAID_AS = {"developer": "system", "function": "tool", "reasoning": "reasoning_content"}
"""Roles and a field that few templates know, and those that say the same."""
_PREFILLS = ("prefix", "partial")
"""What other APIs call a message that is to be continued."""
_NOT_TEXT = "only text parts are accepted; images, audio and files are not supported"
_TEMPLATE_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "template"}
)


class Tokenizer(TextDecoder, Protocol):
    """What the server needs of a tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        ...

    @property
    def tool_template(self) -> str | None:
        """The source of the template for conversations with tools."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]], /, **options: Any) -> list[int]:
        """Ids of a rendered conversation, without a second BOS."""
        ...

    def render_chat(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        """A conversation rendered by the chat template."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they came from if they came from text."""

    ids: tuple[int, ...]
    text: str | None = None


def split_prompts(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """The prompts in the field `name`: a string, strings, ids, or lists of ids; ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such "
            f"lists, not {shown(prompt)}",
            name,
        )
    if not prompt:
        raise invalid(f"{name} must not be empty", name)
    if _all_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"{name} has {len(prompt)} entries, at most {MAX_PROMPTS}", name)
    for i, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and _all_ids(item)):
            raise invalid(
                f"{name}[{i}] must be a string or a list of token ids, not {shown(item)}",
                name,
            )
    return prompt


def _items(value: Any) -> int:
    """Items of a list and of the lists in it."""
    if not isinstance(value, list) or len(value) > SEVERAL:
        return len(value) if isinstance(value, list) else 1
    return len(value) + sum(len(item) for item in value if isinstance(item, list))


def _all_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def normalise_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, parsed arguments; ApiError 400."""
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, f"must be an object, not {shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    for name in _PREFILLS:
        if message.get(name):
            what = "is not offered: continue_final_message goes on behind the last message"
            raise _wrong(f"{where}.{name}", what)
    calls = _calls(message, where)
    out: dict[str, Any] = {"role": _SAID_AS.get(role, role)}
    content = message.get("content")
    if content is None and not (role == "assistant" and calls):
        raise _wrong(f"{where}.content", f"is required of the role {shown(role)}")
    out["content"] = None if content is None else _content(content, f"{where}.content")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise _wrong(f"{where}.{name}", f"must be a string, not {shown(message[name])}")
            out[_SAID_AS.get(name, name)] = message[name]
    if calls:
        out["tool_calls"] = calls
    return out


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string or a list of parts, not {shown(content)}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise _wrong(f"{where}[{i}]", f"{_NOT_TEXT}, not {shown(kind or part)}")
        if not isinstance(part.get(kind), str):
            raise _wrong(f"{where}[{i}].{kind}", f"must be a string, not {shown(part.get(kind))}")
        texts.append(part[kind])
    return "\n".join(texts)


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message's calls, also one in the older form, as `tool_calls`."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    if calls is not None and not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", f"must be a list, not {shown(calls)}")
    out: list[dict[str, Any]] = []
    for i, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        function = _function(function, f"{where}.tool_calls[{i}].function")
        out.append({**call, "type": "function", "function": function})
    if not out and older is not None:
        function = _function(older, f"{where}.function_call")
        out.append({"type": "function", "function": function})
    return out


def _function(function: Any, where: str) -> dict[str, Any]:
    """A call's name and arguments, these as an object, which is what templates iterate over."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, f"must be an object with a name, not {shown(function)}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        what = f"must be JSON text or an object, not {shown(arguments)}"
        raise _wrong(f"{where}.arguments", what)
    if not isinstance(arguments, dict):
        try:
            arguments = strict_json(arguments or "{}")
        except (ValueError, RecursionError):
            raise _wrong(f"{where}.arguments", f"must be JSON, not {shown(arguments)}") from None
    return {**function, "arguments": arguments}


def _wrong(where: str, what: str) -> ApiError:
    return invalid(f"{where} {what}", where)


def chat_options(
    body: ChatBody,
    use: ToolUse | None = None,
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `encode_chat`; ApiError 400 for reserved template variables.

    `variables` are for the template too; chat_template_kwargs go before them.
    """
    extra = {**(variables or {}), **(body.chat_template_kwargs or {})}
    clash = sorted(_TEMPLATE_OWN & set(extra))
    if clash:
        raise invalid(f"chat_template_kwargs may not set {clash[0]}", "chat_template_kwargs")
    goes_on = bool(body.continue_final_message)
    asked = body.add_generation_prompt
    options = {
        **extra,
        "add_generation_prompt": not goes_on if asked is None else asked,
        "continue_final_message": goes_on,
    }
    if use is not None:
        options["tools"] = use.tools
    if body.chat_template is not None:
        options["template"] = body.chat_template
    return options


class PromptEncoder:
    """Tokenises and renders in threads: those that `threads_for` names for work on so many bytes.

    `tokenizer` is None for a model without one.
    """

    def __init__(self, tokenizer: Tokenizer | None, threads_for: Callable[[int], Executor]) -> None:
        self.tokenizer = tokenizer
        self._threads_for = threads_for

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; ApiError 400 naming `param` if the model has none."""
        if self.tokenizer is None:
            raise invalid(f"{param}: this model has no tokenizer; send token ids", param)
        return self.tokenizer

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion request."""
        special = body.add_special_tokens is not False
        return await self.several(body.prompt, "prompt", special)

    async def several(self, value: Any, name: str, add_special_tokens: bool) -> list[Prompt]:
        """The prompts in the field `name`."""
        items = await self.split(value, name)
        return [await self._one(item, add_special_tokens, name) for item in items]

    async def split(self, value: Any, name: str) -> list[str | list[int]]:
        """`split_prompts`, in a thread where there is much to look at."""
        count = _items(value)
        if count <= SEVERAL:
            return split_prompts(value, name)
        return await self._in_thread(8 * count, name, split_prompts, value, name)

    async def text(self, text: str, add_special_tokens: bool, name: str = "prompt") -> Prompt:
        """One text, of the field `name`."""
        encode = self.need_tokenizer(name).encode
        ids = await self._in_thread(len(text), name, encode, text, add_special_tokens)
        return Prompt(tuple(ids), text)

    async def chat(
        self,
        messages: Sequence[Any],
        options: dict[str, Any],
        add_special_tokens: bool,
        weight: int = 0,
    ) -> Prompt:
        """A conversation of about `weight` bytes.

        The template alone decides special tokens unless told to add them.
        """
        tokenizer = self.need_tokenizer("messages")
        run = tokenizer.render_chat if add_special_tokens else tokenizer.encode_chat

        def rendered() -> Any:
            return run(normalise_messages(messages), **options)

        made = await self._in_thread(weight, "messages", rendered)
        return await self.text(made, True) if add_special_tokens else Prompt(tuple(made))

    async def decoded(self, read: Callable[[], Sequence[int]], weight: int) -> str:
        """Text of the ids that `read` returns, special tokens spelled out; `read` may be slow."""
        decode = self.need_tokenizer("tokens").decode
        return await self._in_thread(
            weight, "tokens", lambda: decode(read(), skip_special_tokens=False)
        )

    async def _one(self, item: str | list[int], add_special_tokens: bool, name: str) -> Prompt:
        if isinstance(item, str):
            return await self.text(item, add_special_tokens, name)
        return Prompt(tuple(item))

    async def _in_thread(self, size: int, param: str, function: Any, *args: Any) -> Any:
        """Run on `size` bytes; what the tokenizer or template refuses is the caller's 400."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads_for(size), function, *args)
        except ValueError as error:
            raise invalid(f"{param}: {error}", param) from None
