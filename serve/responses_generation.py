"""Answers of OpenAI's /v1/responses: one response object, whole or as events."""

import time
from typing import Any

from octavo.serve import errors, objects
from octavo.serve.chat_formats import AnswerPlan
from octavo.serve.choice import Choice, Wanted
from octavo.serve.client import EngineClient
from octavo.serve.detokenize import TokenTable
from octavo.serve.errors import ApiError
from octavo.serve.metrics import Recorder
from octavo.serve.objects import Identity
from octavo.serve.output import Delta, TokenText
from octavo.serve.responses_output import EventWriter, OutputItems
from octavo.serve.split_generation import SplitGeneration
from octavo.serve.timing import Visit
from octavo.serve.types import FINISH_ABORT, FINISH_LENGTH


class ResponsesGeneration(SplitGeneration):
    """One sample, answered as a response. `echoed` is what it repeats of the request."""

    def __init__(
        self,
        client: EngineClient,
        recorder: Recorder,
        table: TokenTable | None,
        identity: Identity,
        wanted: Wanted,
        visit: Visit,
        plan: AnswerPlan,
        echoed: dict[str, Any],
    ) -> None:
        super().__init__(client, recorder, table, identity, wanted, visit, plan)
        self._echoed = echoed
        self._begin()

    def _begin(self) -> None:
        self._writer = EventWriter()
        self._output = OutputItems(self._writer, self._shown)

    def _forget(self, choice: Choice) -> None:
        super()._forget(choice)
        self._begin()

    def _shown(self, tokens: list[TokenText]) -> list[dict[str, Any]]:
        """What is said of tokens in the form of a chat's log-probabilities."""
        return self._logprobs(self.choices[0], tokens, 0)["content"] if tokens else []

    def _opening(self) -> bytes:
        begun = self._response("in_progress")
        return b"".join(self._writer.write(k, response=begun) for k in ("created", "in_progress"))

    def _written(self, choice: Choice, delta: Delta) -> bytes:
        return self._output.write(self.split(choice, delta), delta.tokens)

    def _keep(self, choice: Choice, delta: Delta) -> None:
        if self._answers[choice.index].finish_reason is None:
            self._written(choice, delta)

    def _closing(self) -> bytes:
        status = self._status()
        out = self._output.close(status)
        return out + self._writer.write(status, response=self._response(status))

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that `error` cuts short."""
        out = self._output.close("incomplete")
        code = "invalid_prompt" if error.status == 400 else "server_error"
        response = self._response("failed", {"code": code, "message": error.message})
        return out + self._writer.write("failed", response=response)

    def answer(self) -> bytes:
        """The whole response once `collect` is done."""
        status = self._status()
        self._output.close(status)
        return objects.to_json(self._response(status))

    def _status(self) -> str:
        """How it ended; ApiError for an end that there is no word for."""
        if self._answers[0].finish_reason == FINISH_ABORT:
            raise errors.aborted()
        cut = self._answers[0].finish_reason == FINISH_LENGTH
        return "incomplete" if cut else "completed"

    def _response(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        params = self.choices[0].request.params
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._identity.id,
            "object": "response",
            "created_at": self._identity.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "model": self._identity.model,
            "system_fingerprint": self._identity.fingerprint,
            "output": self._output.items,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None if status == "in_progress" else self._response_usage(),
            **self._echoed,
        }

    def _response_usage(self) -> dict[str, Any]:
        sample, prompt = self.choices[0].sample, len(self.choices[0].prompt.ids)
        reasoning = self._answers[0].reasoning_tokens if self._plan.reasoning else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": sample.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": sample.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + sample.completion_tokens,
            **self.timing(sample.cached_tokens),
        }
