"""Endpoints of other servers that are not here: why, and what does the same. Each is a 404."""

_ONE_MODEL = "a server has one model, without adapters"
_HEAD = "it needs a model with such a head, and decoders alone are served"
_TEXT = "only text goes in and out"
_STATELESS = "no answer is kept; POST /v1/responses streams it, and closing the stream cancels it"
_SLEEP = "weights stay on the device; POST /pause holds requests back"
_WEIGHTS = "weights come from files: POST /reload_weights"
_PROFILE = (
    "profiles are taken offline, by octavo bench trace; return_timing tells a request's phases"
)
_BATCHES = "files of requests are answered by the command octavo batch"
_RENDER = "POST /tokenize renders messages and counts their tokens"
_SAGEMAKER = "SageMaker's contract is not offered; use the paths below /v1 and GET /health"
_PARALLEL = "the number of devices is fixed at the start"

ABSENT = {
    "/v1/load_lora_adapter": _ONE_MODEL,
    "/v1/unload_lora_adapter": _ONE_MODEL,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/v1/responses": _STATELESS,
    "/score": "a similarity of two texts needs a model for it; POST /v1/score scores continuations",
    "/generative_scoring": "POST /v1/score gives log-probabilities of continuations",
    "/rerank": _HEAD,
    "/v1/rerank": _HEAD,
    "/v2/rerank": _HEAD,
    "/classify": _HEAD,
    "/pooling": f"{_HEAD}; POST /v1/embeddings pools states",
    "/v2/embed": "use POST /v1/embeddings",
    "/v2": "KServe's protocol is not offered; use the paths below /v1",
    "/v1/audio": _TEXT,
    "/v1/realtime": _TEXT,
    "/v1/images": _TEXT,
    "/v1/files": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/completions/render": _RENDER,
    "/v1/chat/completions/render": _RENDER,
    "/inference/v1/generate": "POST /v1/completions takes and returns token ids",
    "/generate": "use POST /v1/completions",
    "/tokenizer_info": "GET /v1/models says what is served, POST /tokenize what it makes of a text",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/flush_cache": "use POST /reset_prefix_cache",
    "/reset_mm_cache": _TEXT,
    "/reset_encoder_cache": _TEXT,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/collective_rpc": "code in requests is not run",
    "/get_world_size": _PARALLEL,
    "/scale_elastic_ep": _PARALLEL,
    "/is_scaling_elastic_ep": _PARALLEL,
    "/server_info": "GET /version says what runs, GET /metrics how",
    "/load": "GET /metrics has the requests that run and wait",
    "/invocations": _SAGEMAKER,
    "/ping": _SAGEMAKER,
}
"""Path, with all below it, to the reason. Of several that fit, the longest counts."""


def why_absent(path: str) -> str | None:
    """Why there is nothing at a path that other servers have; None for one that is unknown."""
    while path:
        if path in ABSENT:
            return ABSENT[path]
        path = path.rpartition("/")[0]
    return None
