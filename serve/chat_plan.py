"""A chat request's prompt, and how its answers are to be read."""

from dataclasses import replace

from octavo.serve.chat_formats import AnswerPlan, answer_plan
from octavo.serve.context import ServerContext
from octavo.serve.errors import invalid, unsupported
from octavo.serve.prompts import Prompt, chat_options, normalise_messages
from octavo.serve.protocol import ChatBody
from octavo.serve.reasoning import CLOSE, TAIL_TOKENS, ends_in_reasoning, thinking_bound
from octavo.serve.reasoning_effort import EffortControls, effort_controls
from octavo.serve.structured import Structured
from octavo.serve.tool_request import tool_use


async def plan_chat(
    context: ServerContext, body: ChatBody, structured: Structured | None
) -> tuple[Prompt, AnswerPlan | None]:
    """The rendered prompt, and the plan for answers that aren't plain content. ApiError 400.

    A grammar rules the answer from its first token, so a think block that the template opened is
    closed before it. Of tools and `structured` one can be had.
    """
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    special = bool(body.add_special_tokens)
    effort = _effort(context, body)
    options = chat_options(body, use, effort.variables)
    prompt = await context.encoder.chat(body.messages, options, special, body.weight)
    opened = context.formats.reasoning and _in_reasoning(context, body, prompt)
    plan = answer_plan(
        context.formats,
        use,
        constrained=structured is not None,
        opened=opened,
        include_reasoning=body.include_reasoning is not False,
    )
    if use is not None and structured is not None:
        message = f"{structured.field} leaves no room for calls: use it with tool_choice none"
        raise invalid(message, structured.field)
    ruled = structured is not None or (plan is not None and plan.grammar is not None)
    if opened and ruled:
        closing = await context.encoder.text(f"\n{CLOSE}\n\n", False)
        prompt = Prompt((*prompt.ids, *closing.ids))
    field, budget = "thinking_token_budget", body.thinking_token_budget
    if effort.closed:
        field, budget = "reasoning_effort", 0
    return prompt, _bounded(context, plan, field, budget, opened=opened)


def _bounded(
    context: ServerContext, plan: AnswerPlan | None, field: str, budget: int | None, *, opened: bool
) -> AnswerPlan | None:
    """The plan with the bound of reasoning that `field` of the request asks for."""
    if budget is None:
        return plan
    if not context.formats.reasoning:
        reason = "this model's answers hold no reasoning; see the setting reasoning_parser"
        raise unsupported(field, reason)
    tokenizer = context.encoder.need_tokenizer("messages")
    bound = thinking_bound(tokenizer, budget, opened=opened, field=field)
    # Without a parser for it a grammar rules the answer, which holds no reasoning then.
    return replace(plan, thinking=bound) if plan is not None and plan.reasoning else plan


def _effort(context: ServerContext, body: ChatBody) -> EffortControls:
    tokenizer = context.encoder.tokenizer
    own = tokenizer.chat_template if tokenizer is not None else None
    template = body.chat_template or own or ""
    return effort_controls(body.reasoning_effort, template, reasons=context.formats.reasoning)


def _in_reasoning(context: ServerContext, body: ChatBody, prompt: Prompt) -> bool:
    tokenizer = context.encoder.need_tokenizer("messages")
    end = tokenizer.decode(prompt.ids[-TAIL_TOKENS:], skip_special_tokens=False)
    prefill = ""
    if body.continue_final_message:
        prefill = normalise_messages(body.messages[-1:])[0]["content"] or ""
    return ends_in_reasoning(end, prefill)
