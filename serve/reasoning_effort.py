"""How much to reason, in the words of the API, to variables of the model's chat template.

An effort that the template can't express is refused: nothing else would make the model obey it.
"""

from typing import Any

from octavo.sampling.shown import shown
from octavo.serve.errors import invalid, unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
DEFAULT = "medium"
"""The API's own default, so whoever sends it asks for what the model does anyhow."""


def effort_variables(effort: str | None, template: str, *, reasons: bool) -> dict[str, Any]:
    """Template variables for `effort`; ApiError 400 for one that the template knows no words for.

    `template` is the chat template's source; `reasons`: the model's answers may hold reasoning.
    """
    field = "reasoning_effort"
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(f"{field} must be one of {', '.join(EFFORTS)}, not {shown(effort)}", field)
    if field in template:
        return {field: effort}
    if effort == "none":
        if not reasons:
            return {}
        if "enable_thinking" in template:
            return {"enable_thinking": False}
        raise unsupported(field, "this model's chat template can't leave reasoning out")
    if effort == DEFAULT:
        return {}
    raise unsupported(field, f"this model's chat template knows no degrees, not {shown(effort)}")
