"""Grammars through `octavo.LLM`: one for all prompts, one each, streamed, refused."""

import json
import re

import pytest
from test_llm import MODEL, SIZES, assert_empty
from tiny import tiny_tokenizer

import octavo
from octavo import Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
WORDS = Grammar.choice(["yes", "no"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(folder)
    return octavo.LLM(MODEL, tokenizer=str(folder), **SIZES)


def params(seed=1, **fields):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 40, **fields})


def test_one_grammar_for_all_prompts_or_one_each(llm):
    prompts = [[5, 6], [7], [8, 9]]
    for output in llm.generate(prompts, params(n=2), grammar=WORDS):
        for sample in output.outputs:
            assert (sample.text in ("yes", "no"), sample.finish_reason) == (True, "stop")
    free = llm.generate([[7]], params())[0].outputs[0].token_ids
    each = [Grammar.json_schema(SCHEMA), None, Grammar.regex("[ab]{3}")]
    first, second, third = (o.outputs[0] for o in llm.generate(prompts, params(), grammar=each))
    assert json.loads(first.text)["ok"] in (True, False)
    assert second.token_ids == free
    assert re.fullmatch("[ab]{3}", third.text)
    assert_empty(llm)


def test_stream(llm):
    pieces = [piece.text for piece in llm.stream([5, 6], params(), grammar=WORDS)]
    assert "".join(pieces) in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "no-such-type"}), "no-such-type"),
        ([WORDS, None, Grammar.regex("(")], "unclosed"),
        ([WORDS], "3 prompts but 1 grammars"),
    ],
)
def test_a_refused_grammar_raises_and_leaves_nothing_behind(llm, grammar, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[5], [6], [7]], params(), grammar=grammar)
    assert_empty(llm)


def test_a_model_without_a_tokenizer_refuses():
    llm = octavo.LLM(MODEL, **SIZES)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate([[5]], params(), grammar=WORDS)
