"""`octavo.LLM`: the engine as a Python object, in this process."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.serve.config import EngineConfig, override
from octavo.serve.configfile import load_config_file
from octavo.serve.launch import build_engine
from octavo.serve.output import Delta, OutputProcessor, SampleOutput
from octavo.serve.tokenizer import Tokenizer, load_tokenizer
from octavo.serve.types import Request, TokenLogprob

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
        self.engine = build_engine(self.config)
        self.tokenizer: Tokenizer | None = load_tokenizer(
            self.config.tokenizer or self.engine.source
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._serial = 0

    def default_params(self, **fields: Any) -> SamplingParams:
        """The model's own default sampling (generation_config), with `fields` on top."""
        return SamplingParams(**{**self.engine.generation, **fields})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; results keep the prompts' order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all or one a prompt; the model's defaults otherwise.
            progress: show a progress bar with tokens per second.
        """
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type]
        jobs = [self._start(prompt, one) for prompt, one in self._paired(prompts, params)]
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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[CompletionOutput]:
        """Complete one prompt, yielding what each sample gains as it comes.

        Each item's text and token_ids are new ones only. Closing the iterator aborts the request.
        """
        job = self._start(prompt, params or self.default_params())
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
        **template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's chat template."""
        ids = self._require_tokenizer().encode_chat(list(messages), **template_options)
        params = params or self.default_params(max_tokens=None)
        return self.generate([ids], params)[0]

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced float32 logits [T, V] of the ids, through the paged path of serving."""
        return self.engine.score(token_ids)

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
    ) -> Iterable[tuple[Prompt, SamplingParams]]:
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} params; give one or as many"
            )
        return zip(prompts, params, strict=True)

    def _start(self, prompt: Prompt, params: SamplingParams) -> "_Job":
        text = prompt if isinstance(prompt, str) else None
        ids = self._require_tokenizer().encode(text) if text is not None else prompt
        job = _Job(text, tuple(int(i) for i in ids), params)
        try:
            for index in range(params.n):
                request = Request(
                    request_id=f"{self._serial}-{index}",
                    prompt=job.prompt_ids,
                    params=replace(params, n=1),
                    eos_ids=self.engine.eos_ids,
                    sample_index=index,
                )
                self.engine.add(request)
                job.samples[request.request_id] = self._outputs.add(request, track=True)
        except BaseException:
            self._drop(job.samples)
            raise
        self._serial += 1
        return job

    def _run(self, samples: Mapping[str, SampleOutput]) -> Iterator[tuple[str, Delta]]:
        """Step the engine until every sample of `samples` has ended."""
        while any(sample.finish_reason is None for sample in samples.values()):
            deltas, aborts = self._outputs.process(self.engine.step())
            for request_id in aborts:
                self.engine.abort(request_id)
            yield from ((id_, delta) for id_, delta in deltas if id_ in samples)

    def _drop(self, samples: Mapping[str, SampleOutput]) -> None:
        for request_id, sample in samples.items():
            if sample.finish_reason is None:
                self.engine.abort(request_id)
                self._outputs.discard(request_id)


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


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
