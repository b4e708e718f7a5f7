"""How much to reason, in the words of the API, to what makes the model obey it.

That is a variable of the model's chat template, or for none at all a block that is closed as soon
as it opens. Another effort that the template can't express is refused. OpenAI's `reasoning_effort`
and `reasoning.effort` come here as they are, Anthropic's `thinking` of type `disabled` as `none`.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.sampling.shown import shown
from octavo.serve.errors import invalid, unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
DEFAULT = "medium"
"""The API's own default, so whoever sends it asks for what the model does anyhow."""

SWITCH = "enable_thinking"
"""The variable with which templates (Qwen 3, GLM, SmolLM 3) turn reasoning off."""


@dataclass(frozen=True, slots=True)
class EffortControls:
    """What an effort comes to.

    Attributes:
        variables: of the chat template.
        closed: a block of reasoning must end as soon as it begins.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    closed: bool = False


def effort_controls(effort: str | None, template: str, *, reasons: bool) -> EffortControls:
    """The controls for `effort`; ApiError 400 for one that the template knows no words for.

    `template` is the chat template's source; `reasons`: the model's answers may hold reasoning.
    """
    name = "reasoning_effort"
    if effort is None:
        return EffortControls()
    if effort not in EFFORTS:
        raise invalid(f"{name} must be one of {', '.join(EFFORTS)}, not {shown(effort)}", name)
    if name in template:
        return EffortControls({name: effort})
    if effort == "none":
        if SWITCH in template:
            return EffortControls({SWITCH: False})
        return EffortControls(closed=reasons)
    if effort == DEFAULT:
        return EffortControls()
    raise unsupported(name, f"this model's chat template knows no degrees, not {shown(effort)}")
