"""Tool calls and reasoning taken out of text, however the text is cut."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.serve import tool_pythonic
from octavo.serve.answer_parser import CallArguments, CallStart, ContentDelta, ReasoningDelta
from octavo.serve.reasoning import ThinkParser, ends_in_reasoning
from octavo.serve.required_calls import RequiredCalls
from octavo.serve.tool_formats import (
    ForcedCallParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)
from octavo.serve.tool_pythonic import PythonicParser

NAMES = ("f", "get_weather")
PARSERS = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "mistral_announced": lambda names, **kw: MistralParser(names, announced=True, **kw),
    "pythonic": PythonicParser,
    "forced": lambda names, max_calls=None: ForcedCallParser("f"),
    "think": lambda names, max_calls=None: ThinkParser(opened=False),
    "thinking": lambda names, max_calls=None: ThinkParser(opened=True),
}


def run(parser, pieces):
    """Content, reasoning and [name, arguments] of each call; indices and ids checked."""
    events = list(itertools.chain.from_iterable(parser.push(piece) for piece in pieces))
    events += parser.finish()
    content, reasoning, calls, ids = "", "", [], set()
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStart(index, id_, name):
                assert index == len(calls)
                ids.add(id_)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    assert len(ids) == len(calls)
    return content, reasoning, calls


def whole(kind, text, **options):
    return run(PARSERS[kind](NAMES, **options), [text])


# What the formats mean ---------------------------------------------------------------------------

H = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
W = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
CALLS = [
    ("hermes", "plain <b>text</b>", "plain <b>text</b>", []),
    ("hermes", H % '{"a": 1}', "", [["f", '{"a": 1}']]),
    ("hermes", "Sure.\n" + H % "{}", "Sure.", [["f", "{}"]]),
    ("hermes", H % "{}" + "\n" + H % '{"b":[]}' + " Bye", "Bye", [["f", "{}"], ["f", '{"b":[]}']]),
    ("hermes", H % "{}" + "\n between\n" + H % "{}", "between", [["f", "{}"]] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "f"}', "", [["f", '{"a": "}"}']]),
    ("hermes", '<tool_call>{"id": [1], "name": "f"}</tool_call>', "", [["f", "{}"]]),
    ("hermes", H % '{"a": "\\"}</tool_call>"}', "", [["f", '{"a": "\\"}</tool_call>"}']]),
    ("hermes", H % r'"{\"a\": 1}"', "", [["f", '{"a": 1}']]),
    ("hermes", H % "null", "", [["f", "{}"]]),
    ("hermes", H.replace("}\n", "}}\n") % "{}", "}", [["f", "{}"]]),
    # Truncated or broken inside the arguments: what the model wrote of them.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "xy', "", [["f", '{"a": "xy']]),
    ("hermes", H % '{"a": nope}' + "!", "!", [["f", '{"a": nope}}\n']]),
    # Not calls.
    ("hermes", "<tool_call> is a tag", "<tool_call> is a tag", []),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', None, []),
    ("hermes", H % "[1]", None, []),
    ("hermes", H % '"[1]"', None, []),
    ("hermes", '<tool_call>{"name": "f"', None, []),
    ("hermes", '<tool_call>{"name": "f", "name": "f"}</tool_call>', None, []),
    ("hermes", "<tool_call>" * 2 + '{"name":"f"}</tool_call>', "<tool_call>", [["f", "{}"]]),
    ("hermes", "</tool_call> x", None, []),
    ("llama3_json", W, "", [["get_weather", '{"city": "Köln"}']]),
    ("llama3_json", "<|python_tag|>" + W, "", [["get_weather", '{"city": "Köln"}']]),
    ("llama3_json", W + "; " + W + ";" + W, "", [["get_weather", '{"city": "Köln"}']] * 3),
    ("llama3_json", W + "\n" + W, "", [["get_weather", '{"city": "Köln"}']] * 2),
    ("llama3_json", "So:\n" + W + "; ok", "So:; ok", [["get_weather", '{"city": "Köln"}']]),
    ("llama3_json", "Ok " + "<|python_tag|>" + W, "Ok", [["get_weather", '{"city": "Köln"}']]),
    ("llama3_json", "Call " + W + " now", None, []),
    ("llama3_json", '{"name": "f"}', None, []),
    ("llama3_json", '{"name": "Bob", "age": 3}', None, []),
    ("llama3_json", '{"f": 1, "name": "f", "parameters": {}}', None, []),
    ("llama3_json", "<|python_tag|>print(1)", None, []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [["f", '{"a": 1}']]),
    (
        "mistral",
        'Hi [TOOL_CALLS][{"name":"f","arguments":{}}, {"name":"f","arguments":{}, "id":"x"}] z',
        "Hiz",
        [["f", "{}"]] * 2,
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}', "", [["f", '{"a": {"b": 1}}']]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}[TOOL_CALLS]f{}", "", [["f", "{}"]] * 2),
    ("mistral", "[TOOL_CALLS]f[ARGS]{x[TOOL_CALLS]f[ARGS]{}", "", [["f", "{x"], ["f", "{}"]]),
    ("mistral", "[TOOL_CALLS] no", None, []),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}", None, []),
    ("mistral_announced", '[{"name": "f", "arguments": {}}]', "", [["f", "{}"]]),
    ("pythonic", "[f()]", "", [["f", "{}"]]),
    (
        "pythonic",
        '[f(a=1, b=\'x]\\\'\', c=[True, None, -1.5], d={"k": (1,)}), get_weather(city="Köln")]',
        "",
        [
            ["f", '{"a": 1, "b": "x]\'", "c": [true, null, -1.5], "d": {"k": [1]}}'],
            ["get_weather", '{"city": "Köln"}'],
        ],
    ),
    (
        "pythonic",
        'So\n[f(a=true, b="""q"q""")]\nz',
        "Soz",
        [["f", '{"a": true, "b": "q\\"q"}']],
    ),
    ("pythonic", "[f(), 3]", ", 3]", [["f", "{}"]]),
    ("pythonic", "[f(), g()]", ", g()]", [["f", "{}"]]),
    ("pythonic", "[1, 2]", None, []),
    ("pythonic", "see [f()]", None, []),
    ("pythonic", "[f(1)]", None, []),
    ("pythonic", "[f(a=x)]", None, []),
    ("pythonic", "[f(a=1e999)]", None, []),
    ("pythonic", "[f(**{})]", None, []),
    ("pythonic", "[f(a=__import__('os'))]", None, []),
    ("pythonic", "[f(a=1, a=2)]", None, []),
    ("pythonic", "[f(a='x", None, []),
    ("pythonic", "[f(a=" + "(" * 99, None, []),
    ("forced", '{"a": 1}', "", [["f", '{"a": 1}']]),
    ("forced", "", "", [["f", ""]]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CALLS)
def test_formats(kind, text, content, calls):
    want = text if content is None else content
    assert whole(kind, text) == (want, "", calls)


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama3_json"])
def test_deep_nesting_is_not_followed_for_ever(kind):
    deep = '{"a":' * 5000
    text = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": ""}[kind]
    for arguments_first in (True, False):
        head = '{"arguments": ' if arguments_first else '{"name": "f", "arguments": '
        content, _, calls = whole(kind, text + head + deep)
        assert content + "".join(a for _, a in calls) in (text + head + deep, deep)


THOUGHTS = [
    ("think", "<think>\nhm\n</think>\n\nyes", "yes", "hm"),
    ("think", " <think>hm</think>", "", "hm"),
    ("think", "<think>hm ", "", "hm "),
    ("think", "no <think>hm</think>", "no <think>hm</think>", ""),
    ("think", "  plain ", "  plain ", ""),
    ("think", "<thin", "<thin", ""),
    ("thinking", "hm\n</think>\nyes </think>", "yes </think>", "hm"),
    ("thinking", "hm", "", "hm"),
    ("thinking", "</think>yes", "yes", ""),
]


@pytest.mark.parametrize(("kind", "text", "content", "reasoning"), THOUGHTS)
def test_reasoning(kind, text, content, reasoning):
    assert whole(kind, text) == (content, reasoning, [])


def test_whether_the_prompt_opened_the_block():
    assert ends_in_reasoning("user\nassistant\n<think>\n")
    assert not ends_in_reasoning("<think>\n\n</think>\n\n")
    assert not ends_in_reasoning("what is <think>?\nassistant\n")
    assert ends_in_reasoning("go on", prefill="<think> so")
    assert not ends_in_reasoning("go on", prefill="<think> so </think> it")


def test_text_in_f_strings_is_not_compiled(monkeypatch):
    """Python takes quadratic time for many of them in a row, and none is a literal."""
    monkeypatch.setattr(tool_pythonic, "python_arguments", None)
    for prefix in ("f", "rf", "F"):
        text = f"[f(a={prefix}'{{1}}')]"
        assert whole("pythonic", text) == (text, "", [])


def test_one_call_at_most():
    text = "a" + H % '{"a": 1}' + H % "{}" + "rest"
    parser = HermesParser(NAMES, max_calls=1)
    assert run(parser, text) == ("a", "", [["f", '{"a": 1}']])
    assert parser.done
    assert whole("pythonic", "[f(), f()]", max_calls=1) == ("", "", [["f", "{}"]])


# Cutting -----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('ab"\\{}[]<>/\n é\U0001f600;,:')),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<think>", "</think>", "<", "[", "]", "{", "}", "(", ")", ",", ";", ":", '"', "'", "\\"),
        *('"name"', '"arguments"', '"parameters"', '"f"', "f", "f(", "a=", "f()", "null", "1.5e3"),
        *(" ", "\n", "text", "é", '{"name": "f", "arguments": ', '{"a": [1, "}"]}', '\\"'),
        *(H % "{}", W, "[f(a=1)]", '[{"name": "f", "arguments": {}}]'),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


def cut(text, points):
    bounds = [0, *sorted(p % (len(text) + 1) for p in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, points=st.lists(st.integers(0, 400), max_size=12), limited=st.booleans())
def test_the_cut_changes_nothing_and_nothing_is_lost(kind, text, points, limited):
    options = {"max_calls": 1} if limited else {}
    want = whole(kind, text, **options)
    assert run(PARSERS[kind](NAMES, **options), cut(text, points)) == want
    assert run(PARSERS[kind](NAMES, **options), text) == want
    content, reasoning, calls = want
    if not calls and not reasoning and not kind.startswith("think"):
        assert content == text
    if not limited:
        rest = iter(text)
        assert all(char in rest for char in content)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=40, deadline=None)
@given(st.lists(OBJECTS, min_size=1, max_size=3), st.booleans(), st.data())
def test_calls_come_back_as_they_were_made(kind, arguments, ascii_only, data):
    texts = [json.dumps(a, ensure_ascii=ascii_only) for a in arguments]
    named = [f'{{"name": "f", "arguments": {text}}}' for text in texts]
    if kind == "hermes":
        text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in named)
    elif kind == "llama3_json":
        text = "; ".join(named)
    elif kind == "mistral":
        text = "[TOOL_CALLS]" + data.draw(
            st.sampled_from(
                [f" [{', '.join(named)}]", "[TOOL_CALLS]".join(f"f[ARGS]{t}" for t in texts)]
            )
        )
    elif kind == "mistral_announced":
        text = f"[{', '.join(named)}]"
    elif kind == "forced":
        text, arguments = texts[0], arguments[:1]
    elif kind == "pythonic":
        arguments = [{f"k{i}": value for i, value in enumerate(a.values())} for a in arguments]
        made = (", ".join(f"{k}={v!r}" for k, v in a.items()) for a in arguments)
        text = f"[{', '.join(f'f({one})' for one in made)}]"
    else:
        return
    content, _, calls = run(PARSERS[kind](NAMES), text)
    assert (content, [json.loads(a) for _, a in calls]) == ("", arguments)


FEW = st.sampled_from(['{"a": 1}', '{"a": 12}', '{"a": 1, "b": {}}', "{}"])
POINTS = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(FEW, min_size=1, max_size=5), st.integers(0, 400), POINTS)
def test_required_calls_end_where_one_repeats_however_they_are_cut(arguments, length, points):
    repeat = next((i for i, one in enumerate(arguments) if one in arguments[:i]), None)
    text = "\n".join(H % one for one in arguments)[:length]
    parser = RequiredCalls(HermesParser(NAMES))
    content, _, calls = run(parser, cut(text, points))
    assert content == ""
    assert parser.calls == len(calls)
    said = "\n".join(H % one for one in arguments[: repeat and repeat + 1])
    if repeat is not None and len(text) >= len(said.removesuffix("}\n</tool_call>")):
        assert parser.done
        assert calls == [["f", one] for one in arguments[:repeat]]
    else:
        assert not parser.done
        assert calls == whole("hermes", text)[2]
