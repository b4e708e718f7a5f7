"""Rendering of conversations: Hugging Face's helpers, prefill, parts, tools; and the sandbox."""

from types import SimpleNamespace

import pytest

from octavo.serve import chat_template
from octavo.serve.chat_template import ChatTemplateError, render_template
from octavo.serve.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Letters:
    """Just enough of a backend: one id a character, "^" is BOS."""

    def no_truncation(self):
        pass

    no_padding = no_truncation

    def token_to_id(self, token):
        return ord(token)

    def get_added_tokens_decoder(self):
        return {}

    def get_vocab_size(self, with_added_tokens):
        return 128

    def encode_batch_fast(self, texts, add_special_tokens):
        return [SimpleNamespace(ids=[ord(c) for c in text]) for text in texts]


def tokenizer(template=None):
    templates = {} if template is None else {"default": template}
    return Tokenizer(Letters(), special_tokens={"bos_token": "^"}, templates=templates)


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def test_generation_prompt():
    render = tokenizer(CHATML).render_chat
    assert render(chat("hi")) == "<|user|>hi<|end|><|assistant|>"
    assert render(chat("hi"), add_generation_prompt=False) == "<|user|>hi<|end|>"


@pytest.mark.parametrize("start", ["So", "a", "end", "So ", "", "<|end|>", "user"])
def test_continuing_the_final_message(start):
    """Ends right behind the content, whatever markup its text looks like."""
    text = tokenizer(CHATML).render_chat(chat("hi", start), continue_final_message=True)
    assert text == f"<|user|>hi<|end|><|assistant|>{start}"


def test_continuing_needs_a_template_that_shows_the_message():
    with pytest.raises(ValueError, match="does not show the final message"):
        tokenizer("{{ messages[0].content }}").render_chat(
            chat("a", "b"), continue_final_message=True
        )
    with pytest.raises(ValueError, match="exclude each other"):
        tokenizer(CHATML).render_chat(
            chat("a", "b"), continue_final_message=True, add_generation_prompt=True
        )


def test_a_message_with_calls_cannot_be_continued_unless_they_are_its_text():
    """The calls stood behind the cut, and were lost without a word."""
    calls = "{% for c in m.tool_calls or () %}[{{ c.function.name }}]{% endfor %}"
    shows = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}]
    assert tokenizer(shows).render_chat(messages) == "ab[f]"
    with pytest.raises(ValueError, match="its calls stand behind its text"):
        tokenizer(shows).render_chat(messages, continue_final_message=True)
    text = tokenizer(CHATML).render_chat(messages, continue_final_message=True)
    assert text.endswith(
        '<|assistant|>b\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )


def test_text_parts_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    render = tokenizer(CHATML).render_chat
    assert render(chat(parts)) == render(chat("a\nb"))
    looping = (
        "{% for m in messages %}{% for c in m['content'] %}[{{ c.text }}]{% endfor %}{% endfor %}"
    )
    assert tokenizer(looping).render_chat(chat("a", parts)) == "[a][a\nb]"
    with pytest.raises(ValueError, match=r"messages\[0\].*'image_url'"):
        render(chat([{"type": "image_url", "image_url": {"url": "x"}}]))


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"content": "x"}], [{"role": "u", "content": 3}]]
)
def test_bad_messages(messages):
    with pytest.raises(ValueError, match="message"):
        tokenizer(CHATML).render_chat(messages)


def test_tools_documents_and_other_variables():
    template = (
        "{{ tools | tojson }}{{ documents[0].title }}{{ thinking }}{{ bos_token }}"
        "{{ messages[0].tool_calls[0].function.arguments.city }}"
    )
    call = {"function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    text = tokenizer(template).render_chat(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"name": "é<"}],
        documents=[{"title": "T"}],
        thinking=False,
    )
    assert text == '[{"name": "é<"}]TFalse^Köln'


def test_variables_may_have_any_name():
    names = {"self": 1, "messages_": 2, "context": 3, "args": 4, "param": 5, "not a name": 6}
    text = tokenizer("{{ messages_ }}{{ context }}{{ args }}{{ param }}").encode_chat(
        chat("x"), **names
    )
    assert text == [ord(c) for c in "2345"]


def test_a_template_without_tools_gets_them_as_text():
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}, {"function": {"name": "g"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Sure", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "so?"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    text = tokenizer(CHATML).render_chat(messages, tools=tools)
    system, *turns = text.split("<|end|>")
    assert system.startswith("<|system|>Be brief.\n\nYou can call functions.")
    assert '\n{"name": "f", "description": "é"}\n</tools>' in system
    first = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    second = '<tool_call>\n{"name": "g", "arguments": null}\n</tool_call>'
    assert turns == [
        "<|user|>hi",
        f"<|assistant|>Sure\n{first}\n{second}",
        "<|user|><tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nso?",
        "<|assistant|>",
    ]
    alone = tokenizer(CHATML).render_chat(chat("hi"), tools=tools)
    assert alone.startswith("<|system|>You can call functions.")
    assert alone.endswith("<|end|><|user|>hi<|end|><|assistant|>")


def test_templates_that_ask_if_content_is_none_and_add_arguments_to_text():
    """As DeepSeek R1's distilled models do: such calls were dropped, or broke the template."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
        "[{{ c['function']['name'] + ':' + c['function']['arguments'] + '|' }}"
        "{{ c.function.arguments ~ c.function.arguments.x ~ c.function.arguments }}]{% endfor %}"
        "{% else %}{{ m['role'] + '=' + m['content'] }};{% endif %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": '{"x":"é"}'}}]
    for content in (None, ""):
        messages = [
            {"role": "user", "content": None},
            {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "content": "1"},
        ]
        text = tokenizer(template).render_chat(messages)
        assert text == 'user=;[f:{"x": "é"}|{"x": "é"}é{"x": "é"}]tool=1;'
    unasked = "{% for m in messages %}<{{ m.content }}{{ m.tool_calls }}>{% endfor %}"
    assert tokenizer(unasked).render_chat(messages).startswith("<><[{'function'")


def test_a_template_that_shows_calls_but_no_tools_gets_both_as_text():
    template = "{% for m in messages %}{{ m.tool_calls | length }}{{ m.content }}{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    messages = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer(template).render_chat(messages, tools=tools)
    assert '<tools>\n{"name": "f"}' in text
    assert text.endswith('0<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert tokenizer(template).render_chat(messages) == "0hi1"


def test_bos_is_never_doubled():
    assert tokenizer("{{ bos_token }}a").encode_chat(chat("x")) == [ord("^"), ord("a")]
    assert tokenizer("{{ bos_token }}^a").encode_chat(chat("x")) == [ord("^"), ord("a")]
    assert tokenizer("a^^").encode_chat(chat("x")) == [ord(c) for c in "a^^"]
    assert tokenizer("^" * 50_000).encode_chat(chat("x")) == [ord("^")]


def test_no_template():
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer().render_chat(chat("x"))
    assert tokenizer().render_chat(chat("x"), template="{{ messages[0].content }}!") == "x!"


def test_hugging_face_helpers():
    assert render_template("{{ strftime_now('%Y')|length }}", {}) == "4"
    assert render_template("a\n  {% if true %}\nb\n  {% endif %}\nc", {}) == "a\nb\nc"
    stop = "{% if i == 2 %}{% break %}{% endif %}"
    assert render_template("{% for i in range(9) %}" + stop + "{{ i }}{% endfor %}", {}) == "01"
    assert render_template("{% generation %}x{{ 1 }}{% endgeneration %}y", {}) == "x1y"
    value = {"b": 1, "a": "ü"}
    text = render_template("{{ v|tojson(indent=1) }}", {"v": value})
    assert text == '{\n "b": 1,\n "a": "ü"\n}'
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        render_template("{{ raise_exception('roles must alternate') }}", {})


def test_large_numbers_may_be_passed_on():
    """A date or a schema's bound; only what multiplies text is held to a count."""
    for template in (
        "{% macro f(n) %}{{ n }}{% endmacro %}{{ f(n) }}",
        "{{ '' ~ n }}",
        "{{ {}.get('x', n) }}",
        "{{ dict(x=n).x }}",
        "{% set s = namespace(x=n) %}{{ s.x }}",
    ):
        assert render_template(template, {"n": 1_700_000_000}) == "1700000000"


def test_a_filter_that_finds_nothing_is_true():
    """In jinja it is a generator, which a test takes for something whatever it yields."""
    found = "{{ 'yes' if items | selectattr('x') }}"
    listed = "{{ 'yes' if items | selectattr('x') | list }}"
    assert render_template(found, {"items": [{"x": 0}]}) == "yes"
    assert render_template(listed, {"items": [{"x": 0}]}) == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for %}", "syntax error in line 2"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "nested too deeply"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("x" * (1 << 19), "characters"),
    ],
)
def test_template_errors(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render_template(template, {"messages": []})


LOOPS = (
    "{% set r = range(99999) | list %}"
    "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLE = "{% set n = namespace(x='a' * 99) %}{% for i in range(60) %}STEP{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ '1'.zfill(10000000000) }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10000000000) }}",
        "{{ ('a' * 9999999).replace('a', 'a' * 9999999) }}",
        "{{ ('a' * 9999999) | replace('a', 'a' * 9999999) }}",
        "{{ ('a' * 9999999).join(['b'] * 9999999) }}",
        "{{ (['a' * 9999999] * 9999) | join }}",
        "{{ (['a' * 9999999] * 9999) | map('upper') | list }}",
        "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
        "{{ ['a' * 9999999] * 9999 }}",
        "{{ (['a' * 9999999] * 9999) | tojson }}",
        "{{ (['a' * 9999999] * 9999) | string }}",
        "{{ 'a' ~ (['a' * 9999999] * 9999) }}",
        DOUBLE.replace("STEP", "{% set n.x = n.x ~ n.x %}"),
        DOUBLE.replace("STEP", "{% set n.x = n.x + n.x %}"),
        DOUBLE.replace("STEP", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        LOOPS,
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_templates_cannot_exhaust_the_process(monkeypatch, template):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    with pytest.raises(ChatTemplateError):
        render_template(template, {})
