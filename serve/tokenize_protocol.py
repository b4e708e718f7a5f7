"""Request bodies of /tokenize and /detokenize."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from octavo.serve.protocol import ChatBody, TokenIds


class TokenizeBody(BaseModel):
    """POST /tokenize: `prompt`, or `messages` to be rendered by the chat template."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: str | None = None

    def chat(self) -> ChatBody:
        """The chat whose prompt `messages` make."""
        fields = ("add_special_tokens", *OF_MESSAGES)
        return ChatBody(messages=self.messages or [], **{k: getattr(self, k) for k in fields})


OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "reasoning_effort",
)
"""Fields of TokenizeBody that say how messages become a prompt."""


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: TokenIds
