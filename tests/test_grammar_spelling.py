"""Texts that a grammar forces and that the tokenizer would write in tokens of other bytes."""

import pytest
from llguidance import LLTokenizer
from test_engine import LOOPS, PLAIN, check_pages_free
from tiny import EOS, VOCAB, run, tiny_engine, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from octavo.sampling.params import SamplingParams
from octavo.serve import grammar_jobs
from octavo.serve.chat_formats import tool_grammar
from octavo.serve.grammar import Grammars
from octavo.serve.tool_request import ToolUse
from octavo.serve.types import FINISH_STOP, Grammar, Request

TAGS = ("<tool_call>", "</tool_call>")


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch):
    """A slow machine's compiles are not refused."""
    monkeypatch.setattr(grammar_jobs, "COMPILE_SECONDS", 600)


def copy():
    """The tiny tokenizer as those are that write a space as a byte."""
    backend = Tokenizer.from_str(tiny_tokenizer().backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def small_letters(backend):
    """Stands for the normalizers of today's models, which write some accents otherwise (NFC)."""
    backend.normalizer = normalizers.Lowercase()


def with_tags(backend):
    """As Qwen's: no special tokens, but single ones."""
    backend.add_tokens([AddedToken(tag, special=False) for tag in TAGS])


def space_before(backend):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def answers(change, grammars, loop, **fields):
    """The text of each, from an engine whose tokenizer `change` has changed."""
    backend = copy()
    change(backend)
    engine = tiny_engine(eos_ids=(EOS,), **loop)
    engine.grammars = Grammars(lambda: LLTokenizer(backend.to_str(), VOCAB, EOS), VOCAB, (EOS,))
    params = [SamplingParams(seed=i, max_tokens=90, **fields) for i in range(len(grammars))]
    requests = [
        Request(f"r{i}", (5, 6, 7), params[i], grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]
    tokens, last = run(engine, requests)
    check_pages_free(engine)
    assert {(e.finish_reason, e.error) for e in last.values()} == {(FINISH_STOP, None)}
    return [backend.decode(tokens[r.request_id], skip_special_tokens=False) for r in requests]


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
@pytest.mark.parametrize("change", [small_letters, with_tags, space_before])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["jumps", "samples"])
def test_a_forced_text_comes_to_the_letter(change, loop, fields):
    texts = ["A <tool_call> B", "</tool_call>ab ba", " aa", "Name", "no, NO and no"]
    assert answers(change, [Grammar.choice([t]) for t in texts], loop, **fields) == texts


def test_a_choice_of_texts_that_go_on_alike_is_one_of_them():
    texts = ["yes, <tool_call>", "yes, </tool_call>", "no"]
    found = answers(with_tags, [Grammar.choice(texts)] * 6, {"overlap": True})
    assert len(set(found)) > 1
    assert set(found) <= set(texts)


def test_calls_that_have_to_be_made_where_their_tags_are_tokens():
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    use = ToolUse((), {"get": schema}, required=True, parallel=False)
    (text,) = answers(with_tags, [tool_grammar("hermes", use)], {"overlap": True})
    assert text.startswith('<tool_call>\n{"name": "get", "arguments": {')
    assert text.endswith("}\n</tool_call>")
