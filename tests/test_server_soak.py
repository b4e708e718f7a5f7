"""A short soak of a real `octavo serve` on a tiny model; `octavo bench soak` is the long one."""

from collections import Counter
from pathlib import Path

import pytest
from tiny import ARTEFACTS

from octavo.bench import soak
from octavo.bench.soak_cases import Case, content, good_cases
from octavo.bench.soak_client import MANNERS, Soak

GGUF = Path(__file__).parent / "data" / "gguf" / "tiny-llama-q8_0.gguf"
REQUESTS = 120
FEW_PROGRAMS = ("--max_num_seqs=4", "--max_batch_tokens=64")
"""Where they must be compiled first, that is most of this test's time."""


def test_nothing_is_lost_crossed_or_left_behind():
    flags = [f"--model={GGUF}", f"--artefact_dir={ARTEFACTS}", *FEW_PROGRAMS]
    with soak.serving(flags) as server:
        found = soak.soak(server, REQUESTS, at_once=24, copies=1, seed=7)
    assert found["examples"] == []
    assert found["at_rest"]
    further = len(found["mib_per_1000"]) - 1
    assert sum(found["ends"].values()) == found["requests"] == REQUESTS + further * REQUESTS // 4
    assert set(found["ends"]) == {*MANNERS, "refused"}


# The judge can tell


STREAM = b'data: {"choices": [%s], "usage": null}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
CASE = Case("c", "/v1/completions", {})


def chunk(text, reason=b"null", index=0):
    return STREAM % (b'{"index": %d, "text": "%s", "finish_reason": %s}' % (index, text, reason))


def test_a_stream_says_what_the_whole_answer_says():
    data = chunk(b"a") + chunk(b"b", b'"stop"') + END + DONE
    whole = b'{"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}], "usage": '
    whole += b'{"prompt_tokens": 1, "completion_tokens": 2}}'
    expected = content(CASE, whole, streamed=False)
    assert content(CASE, data, streamed=True) == expected == ([["ab", [], "stop"]], [1, 2])


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"a", b'"stop"') + END,
        chunk(b"a", b'"stop"') + DONE,
        chunk(b"a") + END + DONE,
        chunk(b"a", b'"stop"') + chunk(b"a", index=1) + END + DONE,
        chunk(b"a", b'"stop"') + END + DONE + chunk(b"a"),
        b'data: {"error": {"message": "m"}}\n\n' + DONE,
    ],
)
def test_a_stream_that_is_not_whole_is_noticed(data):
    with pytest.raises(ValueError, match="c: "):
        content(CASE, data, streamed=True)


def test_another_requests_answer_is_named():
    judge = Soak(0, [], [], {"c": "mine", "d": "theirs"})
    judge._judge(CASE, "mine", "reads")
    judge._judge(CASE, "theirs", "reads")
    assert judge.tally.ends == Counter(reads=1)
    assert judge.tally.faults == ["c: theirs instead of mine (that is the answer to ['d'])"]


def test_cases_are_the_same_each_time_and_differ_from_each_other():
    cases = good_cases(3)
    assert cases == good_cases(3)
    assert len({case.payload(1, stream=False) for case in cases}) == len(cases)
