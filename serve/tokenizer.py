"""Text to token ids and back, and conversations to prompts. No jax, torch or transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from octavo.serve.chat_messages import CUT_MARK, prepare_messages
from octavo.serve.chat_template import ChatTemplateError, render_template
from octavo.serve.panics import panics_are_errors


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        bos_id: the id that starts a text, if the model has one.
        eos_ids: ids that end a text by the tokenizer's own files, sorted.
        special_ids: ids that skip_special_tokens leaves out.
        vocab_size: ids, added tokens included (a model's embedding may have more rows).
        prefix, suffix: ids put around a text with add_special_tokens.
        templates: chat templates by name; "default" is the usual one.
        special_tokens: e.g. "bos_token" -> its text, as templates see them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.templates = dict(templates or {})
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        bos = self.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = tuple(sorted(set(eos_ids)))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the model has one."""
        return self.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools."""
        return self.templates.get("tool_use") or self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become their ids.

        ValueError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            # A batch of one: `encode` itself would hold the interpreter's lock all the while.
            with panics_are_errors("the tokenizer"):
                (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # what tokenizers says of a str that has no UTF-8 form
            raise ValueError("text is not valid Unicode: it has a lone surrogate") from None
        ids = encoding.ids
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary have none. ValueError for a negative id."""
        try:
            with panics_are_errors("the tokenizer"):
                (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens)
                return text
        except OverflowError:
            raise ValueError("token ids must be in [0, 2**32)") from None

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside it."""
        return self.backend.id_to_token(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role and content each; content is text or a list of text parts.
            add_generation_prompt: end with the start of the assistant's turn; unless given, the
                opposite of continue_final_message.
            continue_final_message: end inside the last message, right behind its content.
            tools: functions in OpenAI's form; a template that shows none gets them as text.
            template: name of one of `templates`, or the text of another.
            variables: further names the template sees (documents, enable_thinking, ...).

        Raises:
            ValueError: no template, a message or part that is not text, both ways to end, or what
                the template itself refuses.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        source = self._choose(template, bool(tools))
        text = render_template(
            source,
            {
                **self.special_tokens,
                **variables,
                "messages": prepare_messages(
                    messages, source, cut=continue_final_message, tools=tools
                ),
                "tools": list(tools) if tools else None,
                "documents": variables.get("documents"),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not continue_final_message:
            return text
        before, found, _ = text.rpartition(CUT_MARK)
        if not found:
            raise ChatTemplateError("the chat template does not show the final message")
        return before

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Ids of `render_chat(messages, **options)`.

        The template writes the special tokens it wants, so none are added; should it (or the text
        it shows) start with BOS twice, one is kept.
        """
        ids = self.encode(self.render_chat(messages, **options), add_special_tokens=False)
        begins = next((i for i, id_ in enumerate(ids) if id_ != self.bos_id), len(ids))
        return ids[max(begins - 1, 0) :]

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Hugging Face libraries read them."""
        backend = Backend.from_str(self.backend.to_str())
        if self.prefix or self.suffix:
            around = {id_: backend.id_to_token(id_) for id_ in (*self.prefix, *self.suffix)}
            backend.post_processor = processors.TemplateProcessing(
                single=[*(around[i] for i in self.prefix), "$A", *(around[i] for i in self.suffix)],
                pair=None,
                special_tokens=[(token, id_) for id_, token in around.items()],
            )
        backend.save(str(folder / "tokenizer.json"))
        named = [{"name": name, "template": text} for name, text in self.templates.items()]
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        if named:
            alone = list(self.templates) == ["default"]
            config["chat_template"] = self.chat_template if alone else named
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _choose(self, template: str | None, tools: bool) -> str:
        if template is not None:
            return self.templates.get(template, template)
        source = self.tool_template if tools else self.chat_template
        if source is None:
            raise ValueError("this model has no chat template; pass one")
        return source
