"""langchain-openai against the server: what its chat, completion and embedding classes send."""

import langchain_openai as langchain
import pytest
from mock_server import running


@pytest.fixture(scope="module")
def options():
    with running() as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        yield {"model": "mock", "base_url": url, "api_key": "none", "max_retries": 0}


def test_a_chat_model_invokes_streams_and_counts(options):
    chat = langchain.ChatOpenAI(**options, temperature=0, max_tokens=6)
    answer = chat.invoke([("system", "s"), ("human", "hi")])
    assert answer.content == "system"
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.response_metadata["finish_reason"] == "length"
    pieces = list(chat.stream("hi", stream_usage=True))
    assert "".join(piece.content for piece in pieces) == "user:h"
    assert sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces) == 6
    assert [a.content for a in chat.batch(["a", "b"])] == ["user:a", "user:b"]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("hi")
    assert len(scored.response_metadata["logprobs"]["content"]) == 6


def test_a_completion_model_and_embeddings(options):
    plain = langchain.OpenAI(**options, temperature=0, max_tokens=4)
    assert plain.invoke("abc") == "abca"
    vectors = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    (one, two), query = vectors.embed_documents(["ab", "c"]), vectors.embed_query("ab")
    assert one == query
    assert one != two
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-5)
