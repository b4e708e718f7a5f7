"""The scheduler's budgets and policy, validated once. No jax."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets and policy.

    Attributes:
        max_num_seqs: row slots.
        max_batch_tokens: query tokens of a step, at least max_num_seqs.
        num_pages: pages of the cache, the padding page included.
        page_size: tokens a page.
        max_model_len: prompt and generated tokens of a request at most.
        max_decode_steps: steps that a pure decode batch may run in one dispatch.
        max_chunk_tokens: prompt tokens of one row in a step; None is no limit of its own.
        overlap: a batch may be scheduled while another is in flight.
        multi_step_when_waiting: several steps a dispatch even while requests wait that can't be
            admitted; without it each step looks at the queue anew.
        prefix_caching: requests share the pages of equal prefixes.
        ageing_seconds: seconds of waiting that weigh as much as one priority level.
        max_waiting: requests that may wait.
        max_waiting_tokens: prompt tokens of those that may wait together; 0 is no limit.
        max_estimated_wait: seconds that a newcomer may have to wait by estimate; 0 is no limit.
        cache_dtype: part of the prefix keys.
        weights_epoch: part of the prefix keys, until `reset_prefixes` changes it.
    """

    max_num_seqs: int
    max_batch_tokens: int
    num_pages: int
    page_size: int
    max_model_len: int
    max_decode_steps: int = 1
    max_chunk_tokens: int | None = None
    overlap: bool = False
    multi_step_when_waiting: bool = False
    prefix_caching: bool = True
    ageing_seconds: float = 10.0
    max_waiting: int = 4096
    max_waiting_tokens: int = 0
    max_estimated_wait: float = 0.0
    cache_dtype: str = ""
    weights_epoch: int = 0

    def __post_init__(self) -> None:
        counts = ("max_num_seqs", "page_size", "max_model_len", "max_decode_steps", "max_waiting")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens is {self.max_chunk_tokens}, must be at least 1")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}, must be at least "
                f"max_num_seqs = {self.max_num_seqs}, so that every row can decode"
            )
        if not 0 < self.ageing_seconds < float("inf"):
            raise ValueError(
                f"ageing_seconds is {self.ageing_seconds}, must be positive and finite"
            )

    @property
    def max_in_flight(self) -> int:
        """Batches that may be scheduled and not yet committed."""
        return 2 if self.overlap else 1
