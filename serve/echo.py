"""The prompt as text, for completions that repeat it."""

from collections.abc import Sequence

from octavo.serve.detokenize import Detokenizer, TokenTable
from octavo.serve.output import TokenText
from octavo.serve.prompts import Prompt
from octavo.serve.types import TokenLogprob


def echo_tokens(
    prompt: Prompt, table: TokenTable, skip: bool, entries: Sequence[TokenLogprob | None] | None
) -> tuple[str, list[TokenText]]:
    """The prompt's text and its tokens, with log-probabilities if the engine sent them."""
    text, pieces = echo_pieces(prompt, table, skip)
    tokens: list[TokenText] = []
    start = 0
    for token_id, piece, entry in zip(prompt.ids, pieces, entries or (None,) * len(pieces)):
        tokens.append(TokenText(token_id, piece, start, entry))
        start += len(piece)
    return text, tokens


def echo_pieces(prompt: Prompt, table: TokenTable, skip: bool) -> tuple[str, list[str]]:
    """The prompt's text and the slice of each of its tokens.

    Text that was given is repeated as it was given: specials written in it stay, specials that the
    tokenizer put before it don't show. Ids follow skip_special_tokens.
    """
    pieces = _slices(prompt.ids, table, skip and prompt.text is None)
    if prompt.text is None:
        return "".join(pieces), pieces
    if "".join(pieces) != prompt.text and prompt.ids[0] in table.special_ids:
        pieces = ["", *_slices(prompt.ids[1:], table, False)]
    return prompt.text, pieces


def _slices(ids: Sequence[int], table: TokenTable, skip: bool) -> list[str]:
    detokenizer = Detokenizer(table, skip_special_tokens=skip, continues=False)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces
