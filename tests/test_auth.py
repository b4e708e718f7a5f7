"""API keys: the file's format, its reloading, rate and concurrency limits, and what logs say."""

import asyncio
import logging

import pytest

from octavo.serve import key_limits
from octavo.serve.auth import KeyRing, read_keys
from octavo.serve.config import ServerConfig
from octavo.serve.errors import ApiError
from octavo.serve.key_limits import ApiKey, Ask, Doorman, KeyLimits, Over, Verdict, alone

FILE = """\
# team: key : requests a minute : concurrency

alice:sk-alice
bob:sk-bob:60
carol:sk-carol::2
dave:sk-dave:30:1
"""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


def ring(path, clock, **config):
    return KeyRing(ServerConfig(api_key_file=str(path), **config), {}, clock)


def status(keys, secret):
    """What a key gets now: its name, or the refusal's status."""
    try:
        name, leave = asyncio.run(keys.enter(secret))
    except ApiError as error:
        return error.status
    leave()
    return name


def test_a_file_gives_names_and_limits(path):
    limits = {key.name: (key.per_minute, key.concurrency) for key in read_keys(path)}
    assert limits == {"alice": (0, 0), "bob": (60, 0), "carol": (0, 2), "dave": (30, 1)}


@pytest.mark.parametrize(
    "line",
    [
        "nocolon",
        ":secret",
        "x:",
        "x y:secret",
        "default:secret",
        "x:secret:many",
        "x:secret:-1",
        "x:secret:1.5",
        "x:secret:1:2:3",
        "x:sécret",
        "x:sec ret",
        "bob:secret",
        "x:sk-bob",
        "x:secret:" + "9" * 10,
        "x:secret::" + "9" * 30,
    ],
)
def test_a_bad_line_is_named_and_its_key_is_not_shown(path, line):
    path.write_text(FILE + line + "\n")
    with pytest.raises(ValueError, match="line 7") as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)
    assert "sk-" not in str(caught.value)


def test_an_empty_file_would_open_the_server_and_is_refused(path, clock):
    path.write_text("# nobody\n")
    with pytest.raises(ValueError, match="holds no key"):
        ring(path, clock)


def test_a_file_that_is_not_there_is_named_with_its_setting(path, clock):
    path.unlink()
    with pytest.raises(ValueError, match=f"^api_key_file {path}: No such file"):
        ring(path, clock)
    path.mkdir()
    with pytest.raises(ValueError, match=f"^api_key_file {path}: Is a directory"):
        ring(path, clock)


def test_flag_environment_and_file_add_up(path, clock):
    assert not KeyRing(ServerConfig(), {}, clock).required
    keys = KeyRing(ServerConfig(), {"OCTAVO_API_KEY": "from-env"}, clock)
    assert keys.required
    assert (status(keys, b"from-env"), status(keys, b"")) == ("default", 401)
    keys = KeyRing(ServerConfig(api_key="flag"), {"OCTAVO_API_KEY": "from-env"}, clock)
    assert (status(keys, b"flag"), status(keys, b"from-env")) == ("default", 401)
    keys = ring(path, clock, api_key="flag")
    assert [status(keys, key) for key in (b"flag", b"sk-alice", b"x")] == ["default", "alice", 401]


@pytest.mark.parametrize("key", ["", "a b", "a:b", "ké", "k" * 513])
def test_a_key_that_nobody_could_send_is_refused(key, clock):
    """A variable that is there and empty was meant to hold one: the server would be open."""
    with pytest.raises(ValueError, match=r"OCTAVO_API_KEY must be 1 \.\. 512 visible"):
        KeyRing(ServerConfig(), {"OCTAVO_API_KEY": key}, clock)
    if key:
        with pytest.raises(ValueError, match=r"api_key must be 1 \.\. 512 visible"):
            KeyRing(ServerConfig(api_key=key), {}, clock)


def test_a_file_of_other_bytes_is_named(path, clock):
    path.write_bytes(b"x:\xff\n")
    with pytest.raises(ValueError, match=f"api_key_file {path}: 'utf-8'"):
        ring(path, clock)


def test_a_changed_file_counts_within_a_second_and_keeps_use(path, clock, caplog):
    keys = ring(path, clock)
    assert status(keys, b"sk-alice") == "alice"
    path.write_text(FILE.replace("alice:sk-alice", "alice:sk-new\nerin:sk-erin"))
    clock.now += 0.5
    assert status(keys, b"sk-new") == 401
    clock.now += 1.0
    assert [status(keys, key) for key in (b"sk-new", b"sk-erin", b"sk-alice")] == [
        "alice",
        "erin",
        401,
    ]
    assert {name: use.requests for name, use in keys.uses()} == {"alice": 2, "erin": 1}
    caplog.set_level(logging.INFO, "octavo.auth")
    for damage in ("broken", ""):
        path.write_text(damage)
        clock.now += 2.0
        assert [status(keys, b"sk-new") for _ in range(3)] == ["alice"] * 3
    path.unlink()
    for _ in range(3):
        clock.now += 2.0
        assert status(keys, b"sk-new") == "alice"
    kept = [r.message for r in caplog.records if "stay as they were" in r.message]
    assert len(kept) == 3  # once a change
    assert "sk-" not in caplog.text


def test_a_minutes_allowance_may_be_spent_at_once_and_refills_evenly(clock):
    limits, ask = KeyLimits(clock), Ask(1, "bob", 3, 0)

    def let_in():
        return [not limits.enter(ask).text for _ in range(4)].count(True)

    assert let_in() == 3
    for now, retry_after in ((0.0, 20), (5.0, 15), (3.0, 15), (5.0, 13)):  # back, and on
        clock.now = now
        verdict = limits.enter(ask)
        assert verdict.text == "API key 'bob' may send 3 requests a minute"
        assert verdict.retry_after == pytest.approx(retry_after)
    clock.now = 18.0
    assert let_in() == 1
    clock.now = 1000.0
    assert let_in() == 3


def test_concurrency_is_given_back(clock):
    doorman, key = alone(clock), ApiKey("dave", b"", concurrency=2)

    async def enter():
        return await doorman.enter(key)

    asyncio.run(enter())
    leave = asyncio.run(enter())
    with pytest.raises(ApiError, match="2 requests running") as caught:
        asyncio.run(enter())
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    leave()
    asyncio.run(enter())


def test_a_key_that_gets_limits_finds_its_running_requests_counted(clock):
    doorman = alone(clock)
    leave = asyncio.run(doorman.enter(ApiKey("x", b"")))
    limited = ApiKey("x", b"", concurrency=1)
    with pytest.raises(ApiError, match="1 requests running"):
        asyncio.run(doorman.enter(limited))
    leave()
    asyncio.run(doorman.enter(limited))


def test_a_request_that_stops_waiting_for_its_verdict_holds_nothing(monkeypatch):
    """Whatever the verdict was or will be: the parent is told that the request is over."""
    monkeypatch.setattr(key_limits, "ANSWER_SECONDS", 0.01)
    sent, key = [], ApiKey("x", b"", concurrency=1)
    doorman = Doorman(sent.append)
    with pytest.raises(ApiError, match="can't be looked up") as caught:
        asyncio.run(doorman.enter(key))
    assert caught.value.status == 503
    doorman.answered(Verdict(0))

    async def given_up():
        task = asyncio.create_task(doorman.enter(key))
        await asyncio.sleep(0)
        doorman.answered(Verdict(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_up())
    assert [message.ticket for message in sent if isinstance(message, Over)] == [0, 1]
