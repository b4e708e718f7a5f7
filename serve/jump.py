"""Which rows take tokens that their grammar forces as input, instead of sampling them. No jax.

Where a grammar leaves a single token, sampling can only draw that one. The row's next dispatch
takes it, and those forced behind it, as a chunk of a prompt, and samples what follows: the same
tokens in fewer steps. In a batch a chunk makes the step a mixed one for every row, padded to a
class of up to four times the tokens, so it has to bring every row's share of that.
"""

from collections.abc import Callable, Sequence

from octavo.serve.request_state import RequestState

Forced = Callable[[str], Sequence[int]]
"""Request -> the tokens that must follow its committed ones."""

JUMP_FROM = 3
"""Forced tokens for each decoding row of a batch from which they are taken as input."""


def nothing_forced(request_id: str) -> Sequence[int]:
    """What an engine without grammars knows."""
    return ()


def jumps(
    running: Sequence[RequestState], forced: Forced, spare: int
) -> dict[str, tuple[int, ...]]:
    """By request, the forced tokens that its next row follows; empty where that does not pay.

    They start behind the committed tokens, so the first `pending` are in flight already; beyond
    these, all rows together gain at most `spare`. One more token always fits into the request.
    """
    found: dict[str, tuple[int, ...]] = {}
    decoding = saved = 0
    for state in running:
        left = state.limit - state.drawn
        if not state.decoding or left <= 0:
            continue
        decoding += 1
        if not state.jumps:
            continue
        most = min(spare - saved, left - 1)
        follow = tuple(forced(state.request_id)[: state.pending + most])
        if len(follow) > state.pending:
            found[state.request_id] = follow
            saved += len(follow) - state.pending
    return found if saved >= JUMP_FROM * decoding else {}
