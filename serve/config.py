"""Settings of the engine and the server. Every field is a flag, a config key and a keyword.

Plain frozen dataclasses, validated on construction; `describe` turns a bad field into one message
that names it and the accepted range. No jax here.
"""

import dataclasses
import difflib
import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

AUTO = "auto"
LOAD_FORMATS = ("auto", "hf", "gguf", "orbax", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "pythonic", "none")
REASONING_PARSERS = ("auto", "think", "none")
ATTENTION_IMPLS = ("auto", "reference", "xla", "mosaic")
DECODE_BLOCKS = ("auto", "xla", "mosaic", "triton")
MATMULS = ("auto", "xla", "mosaic")
PAGE_SIZES = (16, 32, 64, 128)
POOLINGS = ("last", "mean")


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field whose help is shown by `--help`."""
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class EngineConfig:
    """What the engine serves and how large it may grow; `auto` depends on model and device."""

    model: str = setting("smollm2", "path, Hugging Face id, or a packaged demo model (smollm2)")
    tokenizer: str = setting("", "folder or GGUF to take the tokenizer from; empty: the model's")
    load_format: str = setting(AUTO, f"one of {', '.join(LOAD_FORMATS)}; dummy: random weights")
    generation_config: str = setting(AUTO, "auto: the model's default sampling; none: ignore it")
    dtype: str = setting(AUTO, "weights and cache; auto: the checkpoint's, float32 on CPU")
    mesh: str = setting("", "tensor=N shards the model over N devices; empty: one device")
    attention: str = setting(AUTO, f"implementation: one of {', '.join(ATTENTION_IMPLS)}")
    decode_block: str = setting(
        AUTO,
        "what does all between two attentions in decode steps of few rows: one of "
        f"{', '.join(DECODE_BLOCKS)}; mosaic: one kernel, up to 128 rows, no faster for 8B shapes; "
        "triton: four kernels, up to 64 rows; auto: xla",
    )
    matmul: str = setting(
        AUTO,
        f"the layers' products of many rows: one of {', '.join(MATMULS)}; mosaic: a kernel for "
        "those that it was measured to be quicker at; auto: mosaic where it can, else xla",
    )
    max_model_len: int | str = setting(AUTO, "longest prompt + output; auto: the largest that fits")
    page_size: int | str = setting(
        AUTO, "tokens a KV page, 16/32/64/128; auto: 64 on GPU, 16 on CPU"
    )
    num_pages: int | str = setting(AUTO, "KV pages; auto: sized from free memory and kv_fraction")
    kv_fraction: float = setting(
        0.9, "share of device memory for weights, KV and temporaries, (0, 1]"
    )
    max_num_seqs: int | str = setting(
        AUTO, "rows that run at once; auto: 256 (offline 1024) on GPU, 16 on CPU"
    )
    max_batch_tokens: int | str = setting(
        AUTO, "tokens a step computes at most; auto: 8192 on GPU, 512 on CPU"
    )
    mixed_tokens: int | str = setting(
        AUTO,
        "tokens of a step in which many requests decode, of more if few do (max_step_ms bounds its "
        "time instead); auto: about 14 ms of a GPU, no bound on CPU",
    )
    max_decode_steps: int = setting(8, "decode steps in one dispatch at most, 1 .. 64")
    decode_wait_ms: int | str = setting(
        AUTO, "ms a newcomer may wait for multi-step decode; auto: 4 in a server, else no limit"
    )
    max_step_ms: float = setting(
        0.0, "longest gap between a running request's tokens while prompts arrive; 0: no limit"
    )
    overlap: bool = setting(True, "dispatch step n+1 before step n's tokens are read")
    prefix_caching: bool = setting(True, "share KV pages between equal prompt prefixes")
    ageing_seconds: float = setting(
        5.0, "a waiting request gains a priority level each such period"
    )
    max_waiting: int = setting(4096, "requests that may wait for admission")
    max_waiting_tokens: int = setting(0, "prompt tokens that may wait for admission; 0: no limit")
    max_estimated_wait: float = setting(
        0.0, "seconds that a request may have to wait for admission by estimate; 0: no limit"
    )
    warmup: str = setting(
        AUTO,
        "compiled at start: all, plain (greedy and random requests of every length and number), "
        "common (such that are short and come singly), lazy (nothing, all at first use); "
        "auto: all in a GPU server, common in a CPU server, else lazy",
    )
    artefact_dir: str = setting(AUTO, "where compiled programs are kept; empty: nowhere")
    seed: int | None = setting(None, "seeds the requests that bring none; empty: from the system")
    progress: bool = setting(False, "show progress bars while loading and compiling")

    def __post_init__(self) -> None:
        _check_types(self)
        _one_of(self, "load_format", LOAD_FORMATS)
        _one_of(self, "generation_config", (AUTO, "none"))
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "attention", ATTENTION_IMPLS)
        _one_of(self, "decode_block", DECODE_BLOCKS)
        _one_of(self, "matmul", MATMULS)
        _one_of(self, "warmup", (AUTO, "all", "plain", "common", "lazy"))
        if not self.model:
            raise ValueError("model must name a path, a Hugging Face id or a packaged model")
        self.tensor_parallel  # noqa: B018  (validates mesh)
        if self.page_size != AUTO:
            _one_of(self, "page_size", PAGE_SIZES)
        _auto_or_int(self, "max_model_len", 1)
        _auto_or_int(self, "num_pages", 2)
        _auto_or_int(self, "max_num_seqs", 1, 4096)
        _auto_or_int(self, "max_batch_tokens", 1, 1 << 20)
        _auto_or_int(self, "mixed_tokens", 1, 1 << 20)
        _in_range(self, "max_decode_steps", 1, 64)
        _auto_or_int(self, "decode_wait_ms", 0, 60_000)
        _in_range(self, "max_step_ms", 0, 60_000)
        _in_range(self, "max_waiting", 1, 1 << 20)
        _in_range(self, "max_waiting_tokens", 0, 1 << 40)
        _in_range(self, "max_estimated_wait", 0, 86400)
        _in_range(self, "kv_fraction", 0.01, 1.0)
        _in_range(self, "ageing_seconds", 0.001, 1e6)
        if self.seed is not None:
            _in_range(self, "seed", 0, 2**63 - 1)

    @property
    def tensor_parallel(self) -> int:
        """Devices that share the model; 1 without a mesh."""
        if not self.mesh:
            return 1
        name, _, count = self.mesh.partition("=")
        if name != "tensor" or not count.isdigit() or int(count) < 1:
            raise ValueError(f"mesh must be empty or tensor=N with N >= 1, not {self.mesh!r}")
        return int(count)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server around the engine."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on, 0 .. 65535; 0 picks a free one")
    served_model_name: tuple[str, ...] = setting((), "names clients may use; empty: the model's")
    api_key: str = setting("", "clients must send it; empty: OCTAVO_API_KEY, if that is set")
    api_key_file: str = setting(
        "",
        "keys, a line each: name:key[:requests_per_minute[:concurrency]]; read anew on change",
    )
    cors_origins: tuple[str, ...] = setting((), "origins whose pages may call, or *; empty: none")
    tls_cert: str = setting("", "certificate chain (PEM) to serve HTTPS with; empty: plain HTTP")
    tls_key: str = setting("", "private key (PEM) of tls_cert")
    otlp_endpoint: str = setting("", "OTLP/HTTP collector that traces go to; empty: no traces")
    drain_seconds: float = setting(30.0, "after SIGTERM, time for running requests to end")
    receive_seconds: float = setting(60.0, "time in which a request's head, then body, must arrive")
    request_timeout: float = setting(0.0, "seconds a request may take in all; 0: no limit")
    max_body_bytes: int = setting(16 << 20, "largest request body in bytes")
    send_seconds: float = setting(60.0, "time in which a client must take what waits for it")
    watchdog_seconds: float = setting(
        120.0, "an engine silent for so long fails /health, for twice as long is restarted"
    )
    max_engine_restarts: int = setting(
        3, "restarts of a failed engine within the window; 0: end with the engine"
    )
    engine_restart_window: float = setting(
        600.0, "seconds; when the restarts in it are used up, the next waits until one is older"
    )
    api_processes: int = setting(1, "processes that answer HTTP, all on the one port, 1 .. 64")
    tool_parser: str = setting(
        AUTO, f"how the model writes tool calls: one of {', '.join(TOOL_PARSERS)}"
    )
    reasoning_parser: str = setting(
        AUTO, f"how it writes reasoning: one of {', '.join(REASONING_PARSERS)}"
    )
    pooling: str = setting("last", "how /v1/embeddings pools hidden states: last or mean")
    admin_endpoints: bool = setting(
        False, "whether callers may pause and resume the engine and replace its weights"
    )
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        _check_types(self)
        _in_range(self, "port", 0, 65535)
        if not all(self.served_model_name):
            raise ValueError(f"served_model_name holds an empty name: {self.served_model_name!r}")
        _in_range(self, "drain_seconds", 0, 86400)
        _in_range(self, "receive_seconds", 0.1, 86400)
        _in_range(self, "request_timeout", 0, 86400)
        _in_range(self, "max_body_bytes", 1024, 1 << 30)
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint must be an http(s) address, not {self.otlp_endpoint}")
        _in_range(self, "send_seconds", 0.1, 86400)
        _in_range(self, "watchdog_seconds", 0.5, 86400)
        _in_range(self, "max_engine_restarts", 0, 1000)
        _in_range(self, "engine_restart_window", 1, 1e6)
        _in_range(self, "api_processes", 1, 64)
        _one_of(self, "tool_parser", TOOL_PARSERS)
        _one_of(self, "reasoning_parser", REASONING_PARSERS)
        _one_of(self, "pooling", POOLINGS)
        _one_of(self, "log_level", ("debug", "info", "warning", "error"))


def _check_types(config: Any) -> None:
    """Refuse a value of another type than its field's: the text "false" would be true."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(_is_a(value, option) for option in options):
            words = " or ".join(_TYPE_WORDS.get(option, "a list of texts") for option in options)
            raise ValueError(f"{name} must be {words}, not {value!r}")


_TYPE_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "none",
}


def _is_a(value: Any, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _one_of(config: Any, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _in_range(config: Any, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low}, {high}], not {value!r}")


def _auto_or_int(config: Any, name: str, low: int, high: int = 1 << 40) -> None:
    value = getattr(config, name)
    if value == AUTO:
        return
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be auto or an integer in [{low}, {high}], not {value!r}")


def override(config: Any, **values: Any) -> Any:
    """`config` with fields replaced; an unknown name is an error that suggests the nearest one."""
    known = {f.name for f in dataclasses.fields(config)}
    for name in values:
        if name not in known:
            raise ValueError(unknown_field(name, known))
    return dataclasses.replace(config, **values)


def unknown_field(name: str, known: set[str]) -> str:
    """Message for a mistyped setting."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
    return f"unknown setting {name!r}{hint}"
