"""`octavo.LLM`: the engine as a Python object, in this process."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from octavo.interrupts import interrupts_deferred
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.serve.config import EngineConfig, override
from octavo.serve.configfile import load_config_file
from octavo.serve.embedding import PROMPT_ONLY, check_pooling, unit_vector
from octavo.serve.launch import build_engine
from octavo.serve.output import Delta, OutputProcessor, SampleOutput
from octavo.serve.queue import QueueFull
from octavo.serve.tokenizer import Tokenizer, load_tokenizer
from octavo.serve.types import Grammar, Request, TokenEvent, TokenLogprob

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that generates.

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
        elif not isinstance(config, EngineConfig):
            config = load_config_file(config).engine
        if model is not None:
            overrides["model"] = str(model)
        self.config: EngineConfig = override(config, **overrides)
        self.engine = build_engine(self.config, serving=False)
        self.tokenizer: Tokenizer | None = load_tokenizer(
            self.config.tokenizer or self.engine.source
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._inbox: dict[str, list[Delta]] = {}
        self._embedded: dict[str, TokenEvent | None] = {}
        self._serial = 0

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
        try:
            for prompt, one, grammar_ in self._paired(_as_list(prompts), params, grammar):
                jobs.append(self._start(prompt, one, grammar_))
            return self._finish(jobs, progress=progress)
        finally:
            for job in jobs:
                self._drop(job.samples)

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
        job = self._start(prompt, params or self.default_params(), grammar)
        indices = {id_: index for index, id_ in enumerate(job.samples)}
        try:
            for request_id, delta in self._run(job.samples):
                one = _Collected()
                one.add(delta)
                yield one.output(indices[request_id], job.params)
        finally:
            self._drop(job.samples)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's chat template."""
        ids = self._require_tokenizer().encode_chat(list(messages), **template_options)
        params = params or self.default_params(max_tokens=None)
        return self.generate([ids], params, grammar=grammar)[0]

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced float32 logits [T, V] of the ids, through the paged path of serving."""
        return self.engine.score(token_ids)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "last") -> np.ndarray:
        """Embeddings f32[N, E] of length 1, a row for each prompt.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            pooling: "last" takes the last token's final hidden state, "mean" the mean of all.
        """
        check_pooling(pooling)
        ids = [self._prompt_ids(prompt) for prompt in _as_list(prompts)]
        requests: list[Request] = []
        try:
            for prompt in ids:
                self._serial += 1
                request = Request(f"{self._serial}-e", prompt, PROMPT_ONLY, pooling=pooling)
                requests.append(request)
                self._embedded[request.request_id] = None
                self._add(request)
            for request in requests:
                while self._embedded[request.request_id] is None:
                    self._step()
            ends = [self._embedded[request.request_id] for request in requests]
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
                self._embedded.pop(request.request_id, None)
        return np.stack([_vector(end) for end in ends]) if ends else np.zeros((0, 0), np.float32)

    def reload(self, model: str = "") -> int:
        """Replace the weights by those of `model`, or by what the present one's files hold now.

        What runs ends on the old weights first, what waits begins on the new; nothing is compiled.
        Tokenizer and sampling defaults stay. Returns the new weights epoch. ValueError for a model
        that is damaged or of other shapes: the old weights stay.
        """
        staged = self.engine.stage(model)
        self.engine.gate = "closing"
        try:
            while self.engine.begun:
                self._step()
            self.engine.swap(staged)
        finally:
            self.engine.gate = "open"
        return self.engine.weights_epoch

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
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} params; give one or as many"
            )
        if grammar is None or isinstance(grammar, Grammar):
            grammar = [grammar] * len(prompts)
        if len(grammar) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(grammar)} grammars; give one or as many"
            )
        return zip(prompts, params, grammar, strict=True)

    def _start(self, prompt: Prompt, params: SamplingParams, grammar: Grammar | None) -> "_Job":
        if grammar is not None:
            self.engine.grammars.compile(grammar)
        text = prompt if isinstance(prompt, str) else None
        job = _Job(text, self._prompt_ids(prompt), params)
        self._serial += 1
        serial = self._serial
        try:
            for number in range(params.n):
                request = Request(
                    request_id=f"{serial}-{number}",
                    prompt=job.prompt_ids,
                    params=replace(params, n=1),
                    eos_ids=self.engine.eos_ids,
                    sample_index=number,
                    grammar=grammar,
                )
                job.samples[request.request_id] = self._outputs.add(request, track=True)
                self._inbox[request.request_id] = []
                self._add(request)
        except BaseException:
            self._drop(job.samples)
            raise
        return job

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._require_tokenizer().encode(prompt))
        return _token_ids(prompt)

    def _add(self, request: Request) -> None:
        """Queue a request, stepping the engine while the queue is full."""
        while True:
            try:
                return self.engine.add(request)
            except QueueFull:
                self._step()

    def _finish(self, jobs: Sequence["_Job"], *, progress: bool) -> list[RequestOutput]:
        """Run started jobs to their end."""
        samples = {id_: sample for job in jobs for id_, sample in job.samples.items()}
        collected: dict[str, _Collected] = {id_: _Collected() for id_ in samples}
        with tqdm(total=len(samples), disable=not progress, unit="sample") as bar:
            tokens = 0
            for request_id, delta in self._run(samples):
                collected[request_id].add(delta)
                tokens += len(delta.tokens)
                if delta.finish_reason is not None:
                    bar.set_postfix_str(
                        f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
                    bar.update()
        return [job.result(collected) for job in jobs]

    def _run(self, samples: Iterable[str]) -> Iterator[tuple[str, Delta]]:
        """What the samples gain, stepping the engine until every one of them has ended."""
        open_ = list(samples)
        while open_:
            for request_id in open_:
                news = self._inbox[request_id]
                while news:
                    yield request_id, news.pop(0)
            open_ = [id_ for id_ in open_ if self._outputs.follows(id_) or self._inbox[id_]]
            if open_ and not any(self._inbox[id_] for id_ in open_):
                self._step()

    def _step(self) -> None:
        """One engine step; the news of every request goes to its inbox."""
        with interrupts_deferred():
            try:
                self._deliver(self.engine.step())
            except BaseException as error:
                self._deliver(self.engine.recover(f"{type(error).__name__}: {error}"))
                raise

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        events = list(events)
        for event in events:
            if event.request_id in self._embedded:
                self._embedded[event.request_id] = event
        deltas, aborts = self._outputs.process(events)
        for request_id in aborts:
            self.engine.abort(request_id)
        for request_id, delta in deltas:
            self._inbox[request_id].append(delta)

    def _drop(self, samples: Iterable[str]) -> None:
        """Forget requests, running or ended."""
        for request_id in samples:
            self.engine.abort(request_id)
            self._outputs.discard(request_id)
            self._inbox.pop(request_id, None)


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(i) for i in ids)
    except TypeError as error:
        raise ValueError(f"a prompt is a text or a list of token ids: {error}") from None


def _vector(event: TokenEvent | None) -> np.ndarray:
    if event is None or event.embedding is None:
        raise RuntimeError(f"no embedding came: {event and event.error}")
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
    """One prompt in progress: its samples by request id, in order."""

    def __init__(
        self, text: str | None, prompt_ids: tuple[int, ...], params: SamplingParams
    ) -> None:
        self.text, self.prompt_ids, self.params = text, prompt_ids, params
        self.samples: dict[str, SampleOutput] = {}

    def result(self, collected: Mapping[str, _Collected]) -> RequestOutput:
        samples = list(self.samples.items())
        first = samples[0][1]
        return RequestOutput(
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            outputs=[
                collected[id_].output(index, self.params) for index, (id_, _) in enumerate(samples)
            ],
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    one = isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return cast(list[Prompt], [prompts] if one else list(prompts))
