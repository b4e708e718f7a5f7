"""How large the engine may grow: `auto` settings resolved, sizes checked before they are allocated.

Plain arithmetic on numbers the runner measures; no jax here.
"""

from dataclasses import dataclass

from octavo.serve.config import AUTO, EngineConfig

GIB = 1 << 30
CPU_KV_BYTES = 1 * GIB
"""KV bytes an `auto` cache takes at most on CPU, where free memory is not the engine's alone."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that holds the model.

    Attributes:
        limit: what the process may use of the device.
        weights: parameters.
        temporaries: largest temporary allocation of a program.
        page: one KV page over all layers.
    """

    limit: int
    weights: int
    temporaries: int
    page: int


@dataclass(frozen=True)
class Limits:
    """Settings with every `auto` resolved. num_pages counts the padding page."""

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int

    def __str__(self) -> str:
        """One line, for the log."""
        return (
            f"context of {self.max_model_len} tokens, {self.max_num_seqs} rows, "
            f"{self.max_batch_tokens} tokens a step, {self.num_pages} KV pages of {self.page_size} "
            "tokens"
        )

    @property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return -(-self.max_model_len // self.page_size)


def page_size_of(config: EngineConfig, *, on_gpu: bool) -> int:
    """The page size, before anything else can be sized."""
    return _resolved(config.page_size, 64 if on_gpu else 16)


def resolve_limits(
    config: EngineConfig, model_len: int, memory: Memory, *, on_gpu: bool, serving: bool = True
) -> Limits:
    """Sizes that fit, or ValueError with the arithmetic.

    `model_len` is the longest context the model was made for. Offline, where only the whole
    matters, more rows run at once than in a server, where each would wait for the others.
    """
    page_size = page_size_of(config, on_gpu=on_gpu)
    rows, tokens = _rows_and_tokens(config, on_gpu=on_gpu, serving=serving)
    wanted_len = _resolved(config.max_model_len, model_len)
    budget = int(memory.limit * config.kv_fraction) - memory.weights - memory.temporaries
    if config.num_pages == AUTO:
        pages = _auto_pages(wanted_len, rows, page_size, budget, memory, on_gpu=on_gpu)
    else:
        pages = int(config.num_pages)
        if pages * memory.page > budget:
            raise ValueError(_does_not_fit(f"num_pages={pages}", pages, config, memory))
    room = (pages - 1) * page_size
    if room < 1:
        raise ValueError(_does_not_fit("the smallest cache", 2, config, memory))
    if config.max_model_len == AUTO:
        wanted_len = min(wanted_len, room)
    if wanted_len > room:
        needed = -(-wanted_len // page_size) + 1
        raise ValueError(
            f"max_model_len={wanted_len} needs {needed} pages of {page_size} tokens (one is "
            f"padding), but there are {pages}: " + _does_not_fit("it", needed, config, memory)
        )
    return Limits(page_size, pages, wanted_len, rows, tokens)


def _rows_and_tokens(config: EngineConfig, *, on_gpu: bool, serving: bool) -> tuple[int, int]:
    """Rows and tokens of a step. An `auto` one gives way, since each row decodes one token."""
    on_gpu_rows = 256 if serving else 1024
    rows = _resolved(config.max_num_seqs, on_gpu_rows if on_gpu else 16)
    tokens = _resolved(config.max_batch_tokens, 8192 if on_gpu else 512)
    if config.max_batch_tokens == AUTO:
        return rows, max(rows, tokens)
    if config.max_num_seqs == AUTO:
        return min(rows, tokens), tokens
    if tokens < rows:
        raise ValueError(
            f"max_batch_tokens={tokens} must be at least max_num_seqs={rows}: every row decodes "
            "one token a step"
        )
    return rows, tokens


def _auto_pages(
    model_len: int, rows: int, page_size: int, budget: int, memory: Memory, *, on_gpu: bool
) -> int:
    """Pages that the budget holds, and no more than `rows` rows of full length could use."""
    useful = rows * -(-model_len // page_size) + 1
    if not on_gpu:
        one_row = -(-model_len // page_size) + 1
        budget = min(budget, max(CPU_KV_BYTES, min(one_row * memory.page, budget // 2)))
    return max(min(budget // memory.page, useful), 0)


def _does_not_fit(what: str, pages: int, config: EngineConfig, memory: Memory) -> str:
    allowed = int(memory.limit * config.kv_fraction)
    return (
        f"{what} takes {pages} pages x {memory.page} B = {_gib(pages * memory.page)}, beside "
        f"weights {_gib(memory.weights)} and temporaries {_gib(memory.temporaries)}, of "
        f"kv_fraction {config.kv_fraction} x {_gib(memory.limit)} = {_gib(allowed)}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _resolved(value: int | str, default: int) -> int:
    return default if value == AUTO else int(value)
