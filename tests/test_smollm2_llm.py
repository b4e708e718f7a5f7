"""SmolLM2 through `octavo.LLM` in float32: the reference's text in any company and loop."""

import json

import jsonschema
import numpy as np
import pytest
from jsonschema import FormatChecker
from real_models import DATA, NEAR_TIE, smollm2_path
from tiny import ARTEFACTS

import octavo
from octavo import Grammar
from octavo.bench.grammar_schemas import SCHEMAS
from octavo.driver import Driver
from octavo.sampling.params import SamplingParams
from octavo.serve.engine import Engine
from octavo.serve.output import OutputProcessor
from octavo.serve.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.smollm2

PAGES = 129
SIZES = {"max_num_seqs": 4, "max_batch_tokens": 32, "max_model_len": 512, "page_size": 16}
CASES = json.loads((DATA / "smollm2-135m-instruct-q4_1.json").read_text())["greedy"]
LOGPROB_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def loaded():
    return octavo.LLM(
        smollm2_path(), dtype="float32", num_pages=PAGES, artefact_dir=ARTEFACTS, **SIZES
    )


@pytest.fixture
def llm_with(loaded):
    """The loaded model under another scheduler; every program is shared."""
    driver, original = loaded._driver, loaded.engine

    def make(**fields):
        settings = {**SIZES, "num_pages": PAGES, "overlap": True, "max_decode_steps": 8, **fields}
        original.runner.reset_device_state()
        engine = Engine(
            original.runner,
            Scheduler(SchedulerConfig(**settings)),
            max_model_len=settings["max_model_len"],
            eos_ids=original.eos_ids,
            generation=original.generation,
            source=original.source,
            overlap=settings["overlap"],
            seed=0,
        )
        loaded._driver = Driver(engine, OutputProcessor(loaded.tokenizer))
        return loaded

    yield make
    loaded.engine.check()
    assert loaded.engine.stats().pages_used == 0
    loaded._driver = driver


def greedy(max_tokens=20, **fields):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def sure(case):
    """Tokens before the first near tie of the reference."""
    return next((i for i, gap in enumerate(case["top2_gap"]) if gap < NEAR_TIE), len(case["ids"]))


def assert_reference(output, case):
    count = min(sure(case), len(output.outputs[0].token_ids))
    assert count >= 15
    assert list(output.outputs[0].token_ids[:count]) == case["ids"][:count]


PLAIN = {"overlap": False, "max_decode_steps": 1}
WAYS = {
    "plain loop": PLAIN,
    "overlapped multi-step": {},
    "odd chunks, no prefix cache": {"max_batch_tokens": 7, "prefix_caching": False},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_greedy_text_in_a_crowd(llm_with, way):
    """Six prompts and a random companion in four rows; the longest once more, now cached."""
    llm = llm_with(**way)
    prompts = [case["prompt_ids"] for case in CASES]
    company = SamplingParams(temperature=1.0, seed=3, max_tokens=15, ignore_eos=True)
    outputs = llm.generate([*prompts, prompts[1]], [greedy()] * 6 + [company])
    for output, case in zip(outputs, CASES):
        assert_reference(output, case)
    (again,) = llm.generate([prompts[5]], greedy())
    assert_reference(again, CASES[5])
    assert (again.cached_tokens > 0) == way.get("prefix_caching", True)


def test_greedy_text_alone(llm_with):
    """To the end of the reference, from text and from ids."""
    llm, case = llm_with(**PLAIN), CASES[0]
    for prompt in (case["prompt"], case["prompt_ids"]):
        (output,) = llm.generate([prompt], greedy(48))
        assert_reference(output, case)
        assert output.prompt_token_ids == tuple(case["prompt_ids"])


def test_greedy_text_under_preemption(llm_with):
    """Four rows that grow to three or four pages each, in a pool of seven."""
    llm = llm_with(num_pages=8, max_model_len=112)
    outputs = llm.generate([case["prompt_ids"] for case in CASES[:5]], greedy(30))
    for output, case in zip(outputs, CASES):
        assert_reference(output, case)
    assert llm.engine.stats().preemptions > 0


def test_random_draws_do_not_depend_on_company(llm_with):
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=12, ignore_eos=True)
        for seed in range(4)
    ]
    prompts = [case["prompt_ids"] for case in CASES[:4]]
    crowd = llm_with(num_pages=11, max_model_len=160, max_batch_tokens=9).generate(prompts, params)
    llm = llm_with(**PLAIN)
    for prompt, one, output in list(zip(prompts, params, crowd))[:2]:
        assert llm.generate([prompt], one)[0].outputs == output.outputs


def test_logprobs(llm_with):
    llm = llm_with()
    outputs = llm.generate([case["prompt_ids"] for case in CASES], greedy(12, logprobs=5))
    for output, case in zip(outputs, CASES):
        count = min(12, sure(case))
        found = [entry.logprob for entry in output.outputs[0].logprobs[:count]]
        assert np.abs(np.array(found) - case["logprobs"][:count]).max() <= LOGPROB_TOLERANCE
        assert all(len(entry.top) == 5 for entry in output.outputs[0].logprobs)


def test_text_joins_and_is_the_reference(llm_with):
    llm, case = llm_with(), CASES[3]
    stream = list(llm.stream(case["prompt"], greedy()))
    text = "".join(delta.text for delta in stream)
    assert text
    assert case["text"].startswith(text)
    (output,) = llm.generate(case["prompt"], greedy())
    assert output.outputs[0].text == text
    assert output.prompt == case["prompt"]
    assert len(stream) > 10


def test_chat_ends_at_the_end_of_its_turn(llm_with):
    llm = llm_with()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=80)).outputs[0]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason is None
    assert answer.token_ids[-1] == 2
    assert "Paris" in answer.text
    assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ("9,",)}, " 6, 7, 8, "),
        ({"stop": ("9,",), "include_stop_str_in_output": True}, " 6, 7, 8, 9,"),
        ({"stop": (" 8, 9, 1", "zzz")}, " 6, 7,"),
        ({"stop": "7"}, " 6, "),
    ],
)
def test_stop_strings_across_token_boundaries(llm_with, fields, text):
    llm = llm_with()
    (output,) = llm.generate("1, 2, 3, 4, 5,", greedy(**fields))
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason) == (text, "stop")
    assert sample.stop_reason in fields["stop"]
    stream = llm.stream("1, 2, 3, 4, 5,", greedy(**fields))
    assert "".join(delta.text for delta in stream) == text


def test_default_params_are_the_models(llm_with):
    llm = llm_with()
    assert llm.chat([{"role": "user", "content": "Say hello."}], greedy(3)).outputs[0].text
    assert llm.default_params(max_tokens=5).max_tokens == 5


def test_nested_schemas_end_and_validate(loaded):
    """Two of those of `octavo bench grammar`; what they force is not drawn token by token."""
    compact = {"x-guidance": {"whitespace_flexible": False}}
    schemas = {name: SCHEMAS[name] | compact for name in ("config", "order")}
    prompts = [
        loaded.tokenizer.encode_chat([{"role": "user", "content": f"An example of a {name}."}])
        for name in schemas
    ]
    before = loaded.engine.stats().steps
    outputs = loaded.generate(
        prompts,
        SamplingParams(temperature=1.0, seed=0, max_tokens=200),
        grammar=[Grammar.json_schema(schema) for schema in schemas.values()],
    )
    steps = loaded.engine.stats().steps - before
    samples = [output.outputs[0] for output in outputs]
    ended = 0  # both do here; another processor's rounding may draw another text
    for schema, sample in zip(schemas.values(), samples, strict=True):
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), schema, format_checker=FormatChecker())
            ended += 1
    assert ended
    assert steps < max(len(sample.token_ids) for sample in samples)
