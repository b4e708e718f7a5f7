"""The real `openai` client against `octavo serve` with SmolLM2 on the CPU."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import chat_cases
import openai
import pytest
from blackbox import KIT, run_kit
from mock_server import ADDRESS

pytestmark = pytest.mark.smollm2

MODEL = "smollm2"
COUNT = "1, 2, 3, 4, 5, 6,"
ORACLE = Path(__file__).parent / "data" / "real" / "smollm2-135m-instruct-q4_1.json"
CHAT = [{"role": "user", "content": "Count from 1 to 5."}]
START_SECONDS = 600


@pytest.fixture(scope="session")
def base_url(tmp_path_factory):
    """A started server's /v1 URL."""
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "octavo.serve.cli", "serve", f"--model={MODEL}", "--port=0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not (said := ADDRESS.search(log.read_text())) or not _ready(said[1]):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{said[1]}/v1"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=600) as made:
        yield made


def complete(client, prompt=COUNT, **fields):
    fields = {"max_tokens": 9, "temperature": 0, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def chat(client, **fields):
    fields = {"max_tokens": 8, "temperature": 0, "messages": CHAT, **fields}
    return client.chat.completions.create(model=MODEL, **fields)


def test_models(client):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_greedy_completion_is_the_reference(client):
    cases = json.loads(ORACLE.read_text())["greedy"]
    case = next(c for c in cases if c["prompt"].startswith("1, 2"))
    answer = complete(client, case["prompt_ids"], logprobs=2, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert choice.token_ids == case["ids"][:9]
    assert "".join(choice.logprobs.tokens) == choice.text
    for got, want in zip(choice.logprobs.token_logprobs, case["logprobs"]):
        assert abs(got - want) < 5e-3
    assert answer.usage.completion_tokens == 9
    assert choice.finish_reason == "length"


def test_stop_n_and_seed(client):
    answer = complete(client, stop=["8, 9"], max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 7, ", "stop")
    kw = {"n": 2, "seed": 11, "temperature": 1.2, "max_tokens": 6}
    first, second = complete(client, **kw), complete(client, **kw)
    texts = [c.text for c in first.choices]
    assert texts == [c.text for c in second.choices]
    assert texts[0] != texts[1]


def test_chat_stream_equals_plain(client):
    plain = chat(client).choices[0].message.content
    text, usage = "", None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == plain != ""
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_helper_and_logprobs(client):
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, max_tokens=200, temperature=0, stop=[","]
    ) as stream:
        for _ in stream:
            pass
        done = stream.get_final_completion()
    assert done.choices[0].finish_reason == "stop"
    assert "," not in done.choices[0].message.content
    items = chat(client, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(items) == 4
    assert all(len(item.top_logprobs) == 3 for item in items)


def test_prefix_cache_hits_are_reported(client):
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    complete(client, prompt, max_tokens=1)
    again = complete(client, prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_errors_map_to_classes(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=-5)
    with pytest.raises(openai.BadRequestError, match="context"):
        complete(client, max_tokens=100_000)
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match="image"):
        chat(client, messages=[{"role": "user", "content": [part]}])


def test_random_chats_say_the_same_streamed_and_whole(base_url):
    """Tools, formats, stops, samples, histories: deltas join to the message, the usage is one."""
    called = 0
    for seed in range(8):
        body = {"model": MODEL, **chat_cases.request(seed), "cache_salt": f"{seed} whole"}
        whole = chat_cases.of_whole(json.loads(post(base_url, body)))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["cache_salt"] = f"{seed} streamed"  # nothing cached: log-probabilities to the bit
        assert chat_cases.of_stream(post(base_url, body)) == whole, seed
        called += any("tool_calls" in choice["message"] for choice in whole[0].values())
    assert called


IDS = {"return_token_ids": True}


def ids_of(answer, field="token_ids"):
    return getattr(answer.choices[0], field)


def test_filters_of_one_token_are_greedy(client):
    """As hot as it may be: what is left is the likeliest token alone."""
    asked = {"temperature": 2, "seed": 1}
    want = complete(client).choices[0].text
    assert complete(client, **asked).choices[0].text != want
    for filters in ({"top_k": 1}, {"min_p": 1}):
        assert complete(client, **asked, extra_body=filters).choices[0].text == want
    assert complete(client, **asked, top_p=1e-6).choices[0].text == want


@pytest.mark.parametrize(("presence", "frequency"), [(0, 0), (2, 0), (0, 1.5), (-1, 0.5)])
def test_penalties_are_taken_off_what_was_said(client, presence, frequency):
    """Worked out from the log-probabilities, which are of the raw logits."""
    choice = complete(
        client,
        max_tokens=24,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=20,
        extra_body={"return_tokens_as_token_ids": True},
    ).choices[0]
    said = Counter()
    for token, raw in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        left = {t: v - presence * (t in said) - frequency * said[t] for t, v in raw.items()}
        assert token == max(left, key=left.get)
        said[token] += 1
    assert said.total() == 24


def test_repetition_penalty_and_allowed_tokens(client):
    prompt = ids_of(complete(client, extra_body=IDS), "prompt_token_ids")
    ids = ids_of(complete(client, extra_body=IDS | {"repetition_penalty": 10}))
    assert len({*prompt, *ids}) == len(set(prompt)) + len(ids)  # nothing was said again
    allowed = {"allowed_token_ids": [40, 41, 42]}
    held = ids_of(complete(client, temperature=1, seed=3, extra_body=IDS | allowed))
    assert set(held) <= {40, 41, 42}


def test_a_salt_shares_no_pages_with_others(client):
    def cached(**extra):
        answer = complete(client, "Salt and pepper. " * 30, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0
    assert cached(cache_salt="yours") == 0


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<{{ who or 'nobody' }}>{% endif %}"
)
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chat_template": TEMPLATE}, "<user>hi<assistant>yes<nobody>"),
        (
            {"chat_template": TEMPLATE, "chat_template_kwargs": {"who": "you"}},
            "<user>hi<assistant>yes<you>",
        ),
        ({"chat_template": TEMPLATE, "add_generation_prompt": False}, "<user>hi<assistant>yes"),
        (
            {"add_generation_prompt": False},
            f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n",
        ),
        (
            {"continue_final_message": True},
            f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes",
        ),
    ],
)
def test_the_rendered_conversation_is_the_prompt(client, base_url, fields, text):
    """What /tokenize makes of it, word for word, and what the model reads."""
    root = base_url.removesuffix("/v1")
    rendered = json.loads(post(root, {"messages": TURNS, **fields}, "/tokenize"))["tokens"]
    assert json.loads(post(root, {"tokens": rendered}, "/detokenize"))["prompt"] == text
    extra = {**fields, "return_token_ids": True}
    answer = chat(client, messages=TURNS, max_tokens=1, extra_body=extra)
    assert answer.prompt_token_ids == rendered


def post(base_url, body, path="/chat/completions"):
    """The text that a request is answered with."""
    request = urllib.request.Request(base_url + path, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


@pytest.mark.skipif(not KIT.is_dir(), reason="the acceptance kit is not beside this checkout")
@pytest.mark.parametrize("name", ["test_limits.py", "test_stop.py", "test_tools.py"])
def test_acceptance_kit(base_url, name):
    """The whole of it: make test-blackbox."""
    code, output = run_kit(KIT, base_url, [name])
    assert code == 0, output
