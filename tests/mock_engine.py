"""An engine without a model, with outputs that can be worked out by hand, and its byte tokenizer.

Token i of a sample repeats the prompt: prompt[(i + shift) % len(prompt)], where shift is 0 for
greedy requests and seed + sample_index otherwise. Ids in the prompt that are special to the engine
(the tokenizer spells them <|nan|> and so on) make it misbehave on purpose.

What a test must find under way takes as long as the test wants, however slow the machine is: while
a file exists (`MockConfig.hold_file`, mock_server.Running.hold), prompts with <|hold|> make no more
than HELD_TOKENS tokens, compiles and the reading of "slow" weights don't end, nor does a decode of
the id WAITS, and no engine is loaded.
"""

import json
import logging
import os
import signal
import struct
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec

from octavo.serve.queue import QueueFull
from octavo.serve.thinking import Reasoning
from octavo.serve.types import EngineStats, Request, TokenEvent, TokenLogprob

SPECIALS = {"<|bos|>": 256, "<|eos|>": 257, "<|nan|>": 258, "<|boom|>": 259, "<|exit|>": 260}
SPECIALS |= {"<|slow|>": 261, "<|stall|>": 262, "<|badadd|>": 263, "<|hang|>": 264}
SPECIALS |= {"<|compile|>": 265, "<|once|>": 266, "<|hold|>": 267, "<|half|>": 268}
NAMES = {i: name for name, i in SPECIALS.items()}
BOS, EOS, NAN, BOOM, EXIT, SLOW, STALL, BADADD, HANG = list(SPECIALS.values())[:9]
COMPILE, ONCE, HOLD, HALF = list(SPECIALS.values())[9:]
VOCAB = 300
UNSPEAKABLE = 299  # no text: decoding it fails
WAITS = 298  # no text either: decoding it waits while the file exists
HELD_TOKENS = 3

log = logging.getLogger("mock")


def wait_while(path):
    """Until a file is gone; "" is none."""
    while os.path.exists(path):
        time.sleep(0.01)


class ByteTokenizer:
    """One id a byte, specials above; ids beyond those decode to nothing."""

    specials = SPECIALS
    special_ids = frozenset(NAMES)
    vocab_size = VOCAB
    bos_id = BOS
    eos_ids = (EOS,)
    chat_template = tool_template = "yes"
    hold_file = ""

    def encode(self, text, add_special_tokens=True):
        if "fault:tokenise" in text:
            raise RuntimeError("tokenise fault")
        ids = []
        while text:
            name = next((n for n in self.specials if text.startswith(n)), None)
            ids += [self.specials[name]] if name else list(text[0].encode())
            text = text[len(name) :] if name else text[1:]
        return ids

    def decode(self, ids, skip_special_tokens=True):
        out = bytearray()
        if UNSPEAKABLE in ids:
            raise RuntimeError("detokenise fault")
        if WAITS in ids:
            log.info("decoding is held")
            wait_while(self.hold_file)
        for i in ids:
            if i < 256:
                out.append(i)
            elif i in self.special_ids and not skip_special_tokens:
                out += self.id_to_token(i).encode()
        return out.decode(errors="replace")

    def id_to_token(self, token_id):
        names = {i: name for name, i in self.specials.items()}
        return f"<0x{token_id:02X}>" if token_id < 256 else names.get(token_id)

    def render_chat(
        self,
        messages,
        /,
        *,
        add_generation_prompt=True,
        continue_final_message=False,
        template=None,
        **variables,
    ):
        if template and template.startswith("wait for "):
            while not os.path.exists(template.removeprefix("wait for ")):
                time.sleep(0.01)
        if template == "bug":
            raise RuntimeError("template fault")
        if template == "raise" or variables.get("fail"):
            raise ValueError("chat template: refused")
        parts = [f"{m['role']}:{m['content']}" for m in messages]
        return "\n".join(parts) + ("\nassistant:" if add_generation_prompt else "")

    def encode_chat(self, messages, /, **options):
        return self.encode(self.render_chat(messages, **options))


class TaggedTokenizer(ByteTokenizer):
    """One whose think tags are a token each."""

    specials = SPECIALS | {"<think>": 280, "</think>": 281}
    special_ids = frozenset(specials.values())


class SwitchedTokenizer(TaggedTokenizer):
    """One whose template turns reasoning off or on: by a token, or by two."""

    chat_template = "enable_thinking"

    def render_chat(self, messages, /, *, enable_thinking=None, **options):
        end = {None: "", False: "</think>", True: "on"}[enable_thinking]
        return super().render_chat(messages, **options) + end


class SpelledTokenizer(SwitchedTokenizer):
    """One whose template spells all that it is given, as JSON; BOS comes where it is asked for."""

    def encode(self, text, add_special_tokens=True):
        return [BOS] * add_special_tokens + super().encode(text, add_special_tokens)

    def render_chat(self, messages, /, **given):
        return json.dumps({"messages": messages, **given})

    def encode_chat(self, messages, /, **options):
        return self.encode(self.render_chat(messages, **options), False)


@dataclass
class MockConfig:
    """Settings; pickled to the core process. `record`: file of the requests that came, as JSON."""

    model: str = "mock"
    max_model_len: int = 2048
    max_waiting: int = 1000
    step_seconds: float = 0.0
    tokenizer: str = ""
    fail_start: bool = False
    tame: bool = False
    flag_file: str = ""
    hold_file: str = ""
    record: str = ""
    scheduler: dict = field(default_factory=dict)
    generation: dict = field(default_factory=dict)


@dataclass
class _Row:
    request: Request
    made: int = 0
    reasoning: Reasoning | None = None
    added: float = field(default_factory=time.monotonic)


def tokenizer(config):
    made = ByteTokenizer()
    made.hold_file = config.hold_file
    return made


def tagged_tokenizer(config):
    return TaggedTokenizer()


def switched_tokenizer(config):
    return SwitchedTokenizer()


def spelled_tokenizer(config):
    return SpelledTokenizer()


def make(config):
    wait_while(config.hold_file)
    if config.fail_start:
        raise RuntimeError("no such weights")
    if config.flag_file and os.path.exists(config.flag_file + ".fail"):
        raise RuntimeError("the weights have gone")
    if config.scheduler:
        from scheduled_engine import ScheduledEngine

        return ScheduledEngine(config)
    return MockEngine(config)


def expected(prompt, i, shift=0):
    """Token i that the mock generates after `prompt`."""
    return prompt[(i + shift) % len(prompt)]


def pooled(prompt, pooling):
    """An embedding that can be worked out by hand: [length, first id or 0 of "last", last id]."""
    return struct.pack("<3f", len(prompt), prompt[0] * (pooling == "mean"), prompt[-1])


class MockEngine:
    eos_ids = (EOS,)

    def __init__(self, config):
        self.config = config
        self.max_model_len = config.max_model_len
        self.model_config = SimpleNamespace(vocab_size=VOCAB)
        self.generation = dict(config.generation)
        self.rows: dict[str, _Row] = {}
        self.counters = EngineStats(pages_total=100)
        self.gate, self.weights_epoch = "open", 0
        self.seen = None  # all prompts have been, until prefixes are forgotten

    @property
    def begun(self):
        return any(row.made for row in self.rows.values())

    def stage(self, model):
        """Weights by what their name says: bad, slow or fatal ones, or good."""
        if "bad" in model:
            raise ValueError(f"{model} is another model: width is 3, here 2")
        if "slow" in model:
            wait_while(self.config.hold_file)
        return model

    def swap(self, staged):
        assert not self.begun
        if "fatal" in staged:
            raise RuntimeError("the device is full")
        self.weights_epoch += 1

    def forget_prefixes(self):
        self.seen = set()

    def add(self, request):
        if self.config.record:
            with open(self.config.record, "ab") as file:
                file.write(msgspec.json.encode(request) + b"\n")
        if BADADD in request.prompt and not self.config.tame:
            raise RuntimeError("a bug in admission")
        if len(self.rows) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.rows)} requests are waiting")
        if len(request.prompt) > self.max_model_len:
            raise ValueError("prompt too long")
        self.rows[request.request_id] = _Row(request)
        self.counters.prompt_tokens += len(request.prompt)

    def slack(self):
        return 0.0

    def on_compile(self, callback):
        self.announce_compile = callback

    def score(self, token_ids):
        raise RuntimeError("the device is gone")

    def abort(self, request_id):
        if self.rows.pop(request_id, None):
            self._finished("abort")

    def has_work(self):
        return bool(self._moving())

    def _moving(self):
        """Rows that the gate lets go on."""
        if self.gate == "shut":
            return []
        return [row for row in self.rows.values() if self.gate == "open" or row.made]

    def recover(self, reason):
        ids = list(self.rows)
        self.rows.clear()
        return [TokenEvent(i, finish_reason="error", error=reason) for i in ids]

    def stats(self):
        self.counters.running = len(self.rows)
        self.counters.pages_used = len(self.rows)
        return self.counters

    def check(self):
        pass

    def step(self):
        time.sleep(self.config.step_seconds)
        self.counters.steps += 1
        return [event for row in self._moving() for event in self._advance(row)]

    def _first_time(self):
        """Whether no earlier engine of this server has asked."""
        try:
            with open(self.config.flag_file, "x"):
                return True
        except FileExistsError:
            return False

    def _cached(self, prompt):
        """Half of a prompt is in the cache, unless it is the first time since a reset."""
        known = self.seen is None or prompt in self.seen
        if self.seen is not None:
            self.seen.add(prompt)
        return len(prompt) // 2 if known else 0

    def _finished(self, reason):
        finished = self.counters.finished
        finished[reason] = finished.get(reason, 0) + 1

    def _advance(self, row):
        request, prompt = row.request, () if self.config.tame else row.request.prompt
        if BOOM in prompt:
            raise RuntimeError("boom")
        if EXIT in prompt or (ONCE in prompt and self._first_time()):
            os._exit(9)
        if HALF in prompt and row.made == 3 and self._first_time():
            time.sleep(0.2)  # what it has made is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in prompt:
            time.sleep(3600)
        if COMPILE in prompt and not row.made:
            self.announce_compile()
            log.info("compiling")
            wait_while(self.config.hold_file)
        if SLOW in prompt:
            time.sleep(0.02)
        held = HOLD in prompt and row.made >= HELD_TOKENS
        if STALL in prompt or (held and os.path.exists(self.config.hold_file)):
            time.sleep(0.01)
            return
        if request.grammar is not None and "REFUSED" in request.grammar.text:
            del self.rows[request.request_id]
            error = "no such feature"
            yield TokenEvent(request.request_id, finish_reason="error", error=error, invalid=True)
            return
        if NAN in prompt and row.made == 2:
            del self.rows[request.request_id]
            yield TokenEvent(request.request_id, finish_reason="error", error="NaN in the logits")
            return
        yield self._token(row)

    def _token(self, row):
        request, params = row.request, row.request.params
        first = row.made == 0
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = (
                None,
                *(_logprob(t, i, params.prompt_logprobs) for i, t in enumerate(request.prompt[1:])),
            )
        if params.max_tokens == 0:
            del self.rows[request.request_id]
            return TokenEvent(
                request.request_id,
                prompt_logprobs=prompt_logprobs,
                finish_reason="length",
                embedding=pooled(request.prompt, request.pooling) if request.pooling else None,
            )
        shift = (
            self.weights_epoch if params.is_greedy else (params.seed or 0) + request.sample_index
        )
        token = expected(request.prompt, row.made, shift)
        if request.grammar is not None:
            text = f"{request.grammar.kind} {request.grammar.text}".encode()
            token = text[row.made] if row.made < len(text) else EOS
        if params.logit_bias:
            token = max(params.logit_bias, key=params.logit_bias.get)
        if request.thinking is not None:
            row.reasoning = row.reasoning or Reasoning(request.thinking)
            token = row.reasoning.due or token
            row.reasoning.take([token])
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
        stops = stops if row.made >= params.min_tokens else set()
        logprobs = ()
        if params.logprobs is not None:
            logprobs = (_logprob(token, row.made, params.logprobs),)
        row.made += 1
        self.counters.generated_tokens += 1
        reason = "stop" if token in stops else "length" if row.made >= params.max_tokens else None
        if reason:
            del self.rows[request.request_id]
            self._finished(reason)
        return TokenEvent(
            request.request_id,
            (token,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=token if reason == "stop" else None,
            cached_tokens=self._cached(request.prompt) if first else 0,
            waited=(0.0, time.monotonic() - row.added) if first else None,
        )


def _logprob(token, i, top):
    """Logprob -(i+1)/10; the alternatives are the token and the ids after it."""
    value = -(i + 1) / 10
    others = tuple(((token + k) % 256, value - 3 * k) for k in range(top))
    return TokenLogprob(token, value, 1, others)
