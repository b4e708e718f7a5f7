"""`octavo.LLM`: the engine as a Python object, in this process."""

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import numpy as np
from tqdm import tqdm

from octavo.driver import Driver, EventMailbox, Mailbox
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.sampling.shown import shown
from octavo.serve.config import EngineConfig, override
from octavo.serve.configfile import load_config_file
from octavo.serve.embedding import PROMPT_ONLY, check_pooling, unit_vector
from octavo.serve.engine import Engine
from octavo.serve.launch import build_engine
from octavo.serve.output import Delta, OutputProcessor, SampleOutput
from octavo.serve.tokenizer import Tokenizer
from octavo.serve.tokenizer_files import load_tokenizer
from octavo.serve.types import Grammar, Request, TokenEvent, TokenLogprob

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that generates.

    Ctrl-C ends a call between two engine steps, and the next call works. Threads may share it:
    their requests run together.

    Args:
        model: path, Hugging Face id, or a packaged demo model ("smollm2").
        config: EngineConfig, or path of a config file; the defaults otherwise.
        **overrides: EngineConfig fields, e.g. dtype="float32", max_num_seqs=8.

    Raises ValueError for a setting that is unknown or out of range, CheckpointError for a model
    that cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        config: EngineConfig | str | Path | None = None,
        **overrides: Any,
    ) -> None:
        if config is None:
            config = EngineConfig()
        elif not isinstance(config, EngineConfig | str | Path):
            raise ValueError(f"config must be an EngineConfig or a path, not {shown(config)}")
        elif not isinstance(config, EngineConfig):
            config = load_config_file(config).engine
        if model is not None:
            overrides["model"] = str(model)
        self.config: EngineConfig = override(config, **overrides)
        engine = build_engine(self.config, serving=False)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.config.tokenizer or engine.source)
        self._driver = Driver(engine, OutputProcessor(self.tokenizer))
        self._serial = itertools.count(1)

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError after `close`."""
        return self._driver.engine

    def close(self) -> None:
        """Free the model's and the cache's memory. Every later call is a RuntimeError."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM holds a device's memory: it can't be copied or pickled")

    def default_params(self, **fields: Any) -> SamplingParams:
        """The model's own default sampling (generation_config), with `fields` on top."""
        return SamplingParams(**{**self.engine.generation, **fields})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; results keep the prompts' order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all or one a prompt; the model's defaults otherwise.
            grammar: what the texts must be, e.g. Grammar.json_schema({...}): one for all or one a
                prompt. ValueError for a grammar that does not compile.
            progress: show a progress bar with tokens per second.
        """
        jobs: list[_Job] = []
        mailbox: Mailbox = deque()
        try:
            for prompt, one, grammar_ in self._paired(_as_list(prompts), params, grammar):
                jobs.append(self._job(prompt, one, grammar_))
            self._start(jobs, mailbox)
            return self._finish(jobs, mailbox, progress=progress)
        finally:
            self._driver.drop([id_ for job in jobs for id_ in job.ids])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> Generator[CompletionOutput]:
        """Complete one prompt, yielding what each sample gains as it comes.

        Each item's text and token_ids are new ones only. The request starts with the first item;
        closing the iterator aborts it. Several streams may be read in turns.
        """
        mailbox: Mailbox = deque()
        params = self.default_params() if params is None else _checked(params)
        job = self._job(prompt, params, grammar)
        try:
            self._start([job], mailbox)
            for request_id, delta in self._run(job.ids, mailbox):
                one = _Collected()
                one.add(delta)
                yield one.output(job.ids.index(request_id), job.params)
        finally:
            self._driver.drop(job.ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's chat template."""
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a list of messages, not {shown(messages)}")
        ids = self._require_tokenizer().encode_chat(list(messages), **template_options)
        params = self.default_params(max_tokens=None) if params is None else params
        return self.generate([ids], params, grammar=grammar)[0]

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced float32 logits [T, V] of the ids, through the paged path of serving."""
        with self._driver.alone() as engine:
            return engine.score(_token_ids(token_ids))

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "last") -> np.ndarray:
        """Embeddings f32[N, E] of length 1, a row for each prompt.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            pooling: "last" takes the last token's final hidden state, "mean" the mean of all.
        """
        check_pooling(pooling)
        mailbox: EventMailbox = deque()
        job = _Job(None, (), PROMPT_ONLY)
        self._driver.watch(job, job.ids)
        try:
            for prompt in [self._prompt_ids(prompt) for prompt in _as_list(prompts)]:
                job.ids.append(f"{next(self._serial)}-e")
                request = Request(job.ids[-1], prompt, PROMPT_ONLY, pooling=pooling)
                self._driver.submit_plain(request, mailbox)
            while len(mailbox) < len(job.ids):
                self._driver.advance()
        finally:
            self._driver.drop(job.ids)
        ends = {event.request_id: event for event in mailbox}
        rows = [_vector(ends[id_]) for id_ in job.ids]
        return np.stack(rows) if rows else np.zeros((0, 0), np.float32)

    def reload(self, model: str = "") -> int:
        """Replace the weights by those of `model`, or by what the present one's files hold now.

        What runs ends on the old weights first, what waits begins on the new; nothing is compiled.
        Tokenizer and sampling defaults stay. Returns the new weights epoch. ValueError for a model
        that is damaged or of other shapes: the old weights stay.
        """
        return self._driver.swap(self.engine.stage(str(model)))

    # Internals ----------------------------------------------------------------------------------

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.config.model} has no tokenizer files: give prompts as token ids, or set "
                "tokenizer= to a folder or GGUF that has one"
            )
        return self.tokenizer

    def _paired(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammar | Sequence[Grammar | None] | None,
    ) -> Iterable[tuple[Prompt, SamplingParams, Grammar | None]]:
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Sequence):
            _checked(params)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} params; give one or as many"
            )
        if grammar is None or isinstance(grammar, Grammar):
            grammar = [grammar] * len(prompts)
        if not isinstance(grammar, Sequence):
            _checked_grammar(grammar)
        if len(grammar) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(grammar)} grammars; give one or as many"
            )
        return zip(prompts, map(_checked, params), map(_checked_grammar, grammar), strict=True)

    def _job(self, prompt: Prompt, params: SamplingParams, grammar: Grammar | None) -> "_Job":
        grammar = _checked_grammar(grammar)
        if grammar is not None:
            with self._driver.alone() as engine:
                engine.grammars.compile(grammar)
        text = prompt if isinstance(prompt, str) else None
        job = _Job(text, self._prompt_ids(prompt), params, grammar)
        self._driver.watch(job, job.ids)
        return job

    def _start(self, jobs: Sequence["_Job"], mailbox: Mailbox) -> None:
        """Queue the samples of jobs, whose ids the caller drops.

        The longest come first: as the last to end, they would keep the device with few rows to
        compute. Seeds are drawn in the order of the jobs.
        """
        with self._driver.alone() as engine:
            asked = [engine.resolved(one) for job in jobs for one in self._requests(job)]
        asked.sort(key=lambda request: -(request.params.max_tokens or 0))
        samples = self._driver.submit(asked, mailbox)
        for job in jobs:
            job.samples = [samples[id_] for id_ in job.ids]

    def _requests(self, job: "_Job") -> list[Request]:
        """A job's samples, whose ids it takes."""
        serial, requests = next(self._serial), []
        for number in range(job.params.n):
            job.ids.append(f"{serial}-{number}")
            request = Request(
                request_id=job.ids[-1],
                prompt=job.prompt_ids,
                params=replace(job.params, n=1),
                sample_index=number,
                grammar=job.grammar,
            )
            requests.append(request)
        return requests

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._require_tokenizer().encode(prompt))
        return _token_ids(prompt)

    def _finish(
        self, jobs: Sequence["_Job"], mailbox: Mailbox, *, progress: bool
    ) -> list[RequestOutput]:
        """Run started jobs to their end."""
        collected = {id_: _Collected() for job in jobs for id_ in job.ids}
        with tqdm(total=len(collected), disable=not progress, unit="sample") as bar:
            tokens = 0
            for request_id, delta in self._run(list(collected), mailbox):
                collected[request_id].add(delta)
                tokens += len(delta.tokens)
                if delta.finish_reason is not None:
                    bar.set_postfix_str(
                        f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
                    bar.update()
        return [job.result(collected) for job in jobs]

    def _run(self, ids: Sequence[str], mailbox: Mailbox) -> Iterator[tuple[str, Delta]]:
        """What the samples gain, stepping the engine until every one of them has ended."""
        missing = len(ids)
        while missing:
            while mailbox:
                request_id, delta = mailbox.popleft()
                missing -= delta.finish_reason is not None
                yield request_id, delta
            if missing:
                self._driver.advance()


def _checked(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams or a list of them, not {shown(params)}")
    return params


def _checked_grammar(grammar: Any) -> Grammar | None:
    if grammar is not None and not isinstance(grammar, Grammar):
        raise ValueError(f"grammar must be a Grammar or a list of them, not {shown(grammar)}")
    return grammar


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(i) for i in ids)
    except TypeError as error:
        raise ValueError(f"a prompt is a text or a list of token ids: {error}") from None


def _vector(event: TokenEvent) -> np.ndarray:
    if event.embedding is None:
        raise RuntimeError(f"no embedding came: {event.error}")
    return unit_vector(event.embedding)


class _Collected:
    """A sample's deltas joined."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.last = Delta()

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(token.token_id for token in delta.tokens)
        self.logprobs.extend(token.logprob for token in delta.tokens)
        self.last = delta

    def output(self, index: int, params: SamplingParams) -> CompletionOutput:
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(entry for entry in self.logprobs if entry is not None)
        return CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.tokens),
            logprobs=logprobs,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            error=self.last.error,
        )


class _Job:
    """One prompt in progress: ids and outputs of its samples, in order."""

    def __init__(
        self,
        text: str | None,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        grammar: Grammar | None = None,
    ) -> None:
        self.text, self.prompt_ids, self.params = text, prompt_ids, params
        self.grammar = grammar
        self.ids: list[str] = []
        self.samples: list[SampleOutput] = []

    def result(self, collected: Mapping[str, _Collected]) -> RequestOutput:
        first = self.samples[0]
        return RequestOutput(
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            outputs=[
                collected[id_].output(number, self.params) for number, id_ in enumerate(self.ids)
            ],
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be a text, token ids or a list, not {shown(prompts)}")
    one = isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return cast(list[Prompt], [prompts] if one else list(prompts))
