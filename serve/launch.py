"""From an EngineConfig to an Engine: load the model, size the cache, ready the programs."""

import logging
import os
import time
from dataclasses import asdict, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import octavo.attention
import octavo.cache
import octavo.model
import octavo.sampling
import octavo.serve
from octavo.attention.api import BY_KERNEL
from octavo.attention.decode_tuning import one_chunk_tokens
from octavo.attention.mosaic import refuse_device
from octavo.model.blocks import BLOCKS
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.resolve import resolve_model
from octavo.model.checkpoint.source import Checkpoint
from octavo.model.config import ModelConfig
from octavo.model.families import family_of
from octavo.model.params import param_bytes
from octavo.model.products import matmul_refusal
from octavo.model.sharding import device_bytes, host_mesh, make_mesh
from octavo.sampling.pack import MAX_EOS_IDS
from octavo.sampling.shown import shown
from octavo.serve import devices
from octavo.serve.artefact import ArtefactStore, ExposedError, root_of, source_digest
from octavo.serve.buckets import make_buckets
from octavo.serve.compile import ProgramKey
from octavo.serve.config import AUTO, EngineConfig
from octavo.serve.engine import Engine
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import token_source
from octavo.serve.grammar_trial import Trials
from octavo.serve.limits import GIB, Limits, Memory, page_size_of, resolve_limits
from octavo.serve.lowering_pool import lowering
from octavo.serve.mixed_steps import MixedSteps, least_tokens
from octavo.serve.pace import SERVING_DECODE_WAIT
from octavo.serve.programs import ProgramBuilder, ProgramSettings
from octavo.serve.runner import Runner
from octavo.serve.scheduler import Scheduler, SchedulerConfig
from octavo.serve.step import Graph
from octavo.serve.step_budget import StepBudget
from octavo.serve.timeline import Timeline
from octavo.serve.tokenizer_files import load_tokenizer

log = logging.getLogger("octavo.launch")

DEVICE_CODE = (octavo.attention, octavo.cache, octavo.model, octavo.sampling)
HOST_CODE = ("batch", "buckets", "lowering", "packing", "programs", "step")
"""Modules of serve/ that decide what a program is."""


def _source() -> str:
    serve = Path(octavo.serve.__path__[0])
    folders = [Path(package.__path__[0]) for package in DEVICE_CODE]
    return source_digest([*folders, *(serve / f"{name}.py" for name in HOST_CODE)])


SOURCE = _source()
"""Read as the modules are imported: a file that changes later is not the code that runs here."""

IMPORT_SECONDS = time.monotonic() - octavo.STARTED
"""From the first import of octavo to the last one that an engine needs."""


def build_engine(config: EngineConfig, *, serving: bool = True, strict: bool = False) -> Engine:
    """An engine that is ready for requests.

    `serving` bounds the wait of newcomers (decode_wait_ms); `strict` makes a compile after warm-up
    an error. Raises ValueError where settings and model or device don't fit, CheckpointError for a
    model that can't be loaded.
    """
    timeline = Timeline(IMPORT_SECONDS)
    devices.configure_xla()
    devices.kinds()
    timeline.ended("device")
    checkpoint = load(config)
    jax.block_until_ready(checkpoint.params)
    timeline.ended("weights")
    engine = assemble(config, checkpoint, serving=serving, strict=strict)
    timeline.ended("sizes")
    _warm(engine, config, serving=serving)
    programs = engine.runner.programs
    timeline.ended("programs")
    timeline.compiled, timeline.loaded = programs.stats.compiled, programs.stats.loaded
    engine.timeline = timeline
    log.info("%s", timeline)
    return engine


def _warm(engine: Engine, config: EngineConfig, *, serving: bool) -> None:
    """Make programs ready before the first request, as many as the setting says."""
    wanted = config.warmup
    if wanted == AUTO:
        wanted = "lazy" if not serving else "all" if devices.on_gpu() else "common"
    builder, programs = engine.runner.builder, engine.runner.programs
    keys = {"all": builder.warmup_keys, "plain": builder.plain_keys, "common": builder.common_keys}
    if wanted in keys:
        programs.warm(
            keys[wanted](),
            workers=os.cpu_count() or 1,
            progress=config.progress,
            lowering=partial(lowering, builder),
        )
    if wanted == "all":
        programs.seal()


def load(config: EngineConfig, *, to_run: bool = True) -> Checkpoint:
    """The model's parameters on their devices.

    dtype "auto" is the checkpoint's own, but float32 to run on a CPU.
    """
    dtype = config.dtype
    if dtype == AUTO and to_run and not devices.on_gpu():
        dtype = "float32"
    mesh = make_mesh(config.tensor_parallel) if config.mesh else None
    return load_checkpoint(
        resolve_model(config.model),
        dtype=dtype,
        mesh=mesh,
        load_format=config.load_format,
        progress=config.progress,
    )


def assemble(
    config: EngineConfig, checkpoint: Checkpoint, *, serving: bool = False, strict: bool = False
) -> Engine:
    """Engine around loaded parameters."""
    gpu = devices.on_gpu()
    mesh = make_mesh(config.tensor_parallel) if config.mesh else None
    model = checkpoint.config
    if len(checkpoint.eos_ids) > MAX_EOS_IDS:
        raise ValueError(f"{len(checkpoint.eos_ids)} end-of-sequence ids, at most {MAX_EOS_IDS}")
    if config.max_model_len != AUTO:
        model = _with_max_len(model, int(config.max_model_len))
    page_size = page_size_of(config, on_gpu=gpu)
    block, matmul = _block(config, model, mesh), _matmul(config, model, mesh)
    graph = Graph(family_of(model), model, config.attention, mesh, page_size, block, matmul)
    limits = _limits(config, graph, gpu=gpu, serving=serving)
    settings = _settings(config, limits, model, gpu=gpu)
    layout = model.cache_layout(limits.num_pages, page_size)
    store = _store(config, graph, {"limits": asdict(limits), "settings": repr(settings)})
    _require_attention(ProgramBuilder(graph, layout, settings))
    runner = Runner(graph, checkpoint.params, layout, settings, store, strict=strict)
    budget = _step_budget(config, settings)
    mixed = _mixed_steps(config, checkpoint, settings, gpu=gpu, serving=serving)
    scheduler = Scheduler(
        _scheduler_config(config, limits, layout.dtype, serving=serving),
        (budget or mixed).prefill_tokens,
        settings.buckets.worthwhile,
    )
    log.info("%s: %s (%.2f GiB)", config.model, limits, layout.num_pages * layout.page_bytes / GIB)
    return Engine(
        runner,
        scheduler,
        max_model_len=limits.max_model_len,
        eos_ids=checkpoint.eos_ids,
        grammars=_grammars(config, checkpoint, serving=serving),
        generation=checkpoint.generation if config.generation_config == AUTO else {},
        source=checkpoint.path,
        overlap=config.overlap,
        decode_wait=_decode_wait(config, serving=serving),
        budget=budget,
        seed=config.seed,
        stage=partial(stage, config, model),
    )


def stage(config: EngineConfig, model: ModelConfig, name: str) -> Checkpoint:
    """The weights of another model like `model`, or of `config`'s own for "", in host memory.

    CheckpointError for damaged files; ValueError naming what differs in a model of another kind.
    """
    path = resolve_model(name or config.model)
    checkpoint = load_checkpoint(
        path,
        dtype=model.dtype,
        mesh=host_mesh(),
        load_format=config.load_format,
        kv_replicas=model.kv_replicas,
    )
    other = checkpoint.config
    if config.max_model_len != AUTO:
        other = _with_max_len(other, int(config.max_model_len))
    differing = [
        f"{field.name} is {shown(getattr(other, field.name))}, here "
        f"{shown(getattr(model, field.name))}"
        for field in fields(model)
        if getattr(other, field.name) != getattr(model, field.name)
    ]
    if differing:
        raise ValueError(f"{path} is another model: {'; '.join(differing)}")
    return checkpoint


def _scheduler_config(
    config: EngineConfig, limits: Limits, cache_dtype: str, *, serving: bool
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        max_decode_steps=config.max_decode_steps,
        overlap=config.overlap,
        prefix_caching=config.prefix_caching,
        ageing_seconds=config.ageing_seconds,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_estimated_wait=config.max_estimated_wait,
        multi_step_when_waiting=not serving,
        cache_dtype=cache_dtype,
    )


def _grammars(config: EngineConfig, checkpoint: Checkpoint, *, serving: bool) -> Grammars:
    """What follows grammars; the tokenizer is loaded when the first one comes.

    A server's grammars come from strangers, so they are tried before they are compiled.
    """
    load = partial(load_tokenizer, config.tokenizer or checkpoint.path)
    vocab_size, eos_ids = checkpoint.config.vocab_size, checkpoint.eos_ids
    source = cache(partial(token_source, load, vocab_size, eos_ids))
    trial = Trials(source) if serving else None
    return Grammars(lambda: source().tokenizer(), vocab_size, eos_ids, trial)


def _with_max_len(model: ModelConfig, max_len: int) -> ModelConfig:
    """The model for a chosen context; one longer than its positions needs dynamic rope scaling."""
    dynamic = any(layer.rope.kind == "dynamic" for layer in model.layers)
    if max_len > model.max_position_embeddings and not dynamic:
        raise ValueError(
            f"max_model_len={max_len} exceeds the model's {model.max_position_embeddings} positions"
        )
    return model.with_max_len(max_len)


def _decode_wait(config: EngineConfig, *, serving: bool) -> float | None:
    """Seconds that multi-step decode may add to a newcomer's wait; None is no limit."""
    if config.decode_wait_ms == AUTO:
        return SERVING_DECODE_WAIT if serving else None
    return int(config.decode_wait_ms) / 1e3


def _step_budget(config: EngineConfig, settings: ProgramSettings) -> StepBudget | None:
    """What keeps mixed steps within max_step_ms; None without that limit."""
    if not config.max_step_ms:
        return None
    return StepBudget(config.max_step_ms / 1e3, settings.buckets.mixed_tokens)


def _mixed_steps(
    config: EngineConfig,
    checkpoint: Checkpoint,
    settings: ProgramSettings,
    *,
    gpu: bool,
    serving: bool,
) -> MixedSteps:
    """What keeps mixed steps short where no max_step_ms does; on a CPU all steps are."""
    classes = settings.buckets.mixed_tokens
    if config.mixed_tokens != AUTO:
        least = int(config.mixed_tokens)
    elif gpu:
        weights = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params["layers"]))
        least = least_tokens(weights, config.tensor_parallel)
    else:
        least = classes[-1]
    return MixedSteps(least, classes, serving=serving)


def _block(config: EngineConfig, model: ModelConfig, mesh: Mesh | None) -> str:
    """What does decode steps' work between attentions; ValueError if the model can't have it."""
    name = config.decode_block
    if name not in BLOCKS:
        return "xla"
    if refusal := BLOCKS[name].refusal(model, mesh):
        raise ValueError(f"decode_block={name}: {refusal}")
    return name


def _matmul(config: EngineConfig, model: ModelConfig, mesh: Mesh | None) -> str:
    """What does products of many rows; ValueError if the model can't have what is named."""
    refusal = matmul_refusal(model, mesh)
    if config.matmul == "mosaic" and refusal:
        raise ValueError(f"matmul=mosaic: {refusal}")
    return "xla" if refusal or config.matmul == "xla" else "mosaic"


def _require_attention(builder: ProgramBuilder) -> None:
    """ValueError at start, not at the first request, if the named implementation refuses."""
    name, buckets = builder.graph.attention, builder.settings.buckets
    if name == AUTO:
        return
    for bucket in (buckets.decode(1, 1), buckets.mixed(1, 1, 1)):
        lowerable = builder.build(ProgramKey("forward", bucket))
        try:
            lowerable.jitted.trace(*lowerable.args)
        except NotImplementedError as refusal:
            raise ValueError(f"attention={name}: {refusal}") from refusal


def _limits(config: EngineConfig, graph: Graph, *, gpu: bool, serving: bool) -> Limits:
    """Sizes that fit the device, with the largest program's temporaries measured on a GPU."""
    one_page = graph.config.cache_layout(1, graph.page_size).page_bytes // config.tensor_parallel
    specs = graph.family.abstract_params(graph.config)
    weights = device_bytes(specs, graph.mesh) if graph.mesh else param_bytes(specs)
    # On a CPU the limit is what is free now, with the weights already loaded.
    limit = devices.memory_limit() + (0 if gpu else weights)
    memory = Memory(limit, weights, 0, one_page)
    model_len = graph.config.max_position_embeddings
    resolve = partial(resolve_limits, config, model_len, on_gpu=gpu, serving=serving)
    if not gpu:
        return resolve(memory)
    temporaries = _measure_temporaries(config, graph, resolve(memory))
    return resolve(replace(memory, temporaries=temporaries))


def _measure_temporaries(config: EngineConfig, graph: Graph, draft: Limits) -> int:
    """Bytes that a step takes beside weights and cache.

    Per-slot sampling state, and the temporaries of the largest prefill program, which is compiled
    once for a cache of two pages.
    """
    settings = _settings(config, draft, graph.config, gpu=True)
    store = _store(config, graph, {"temporaries": repr(settings)})
    known = store.load("temporaries") if store else None
    if known is not None:
        return int(known)
    builder = ProgramBuilder(graph, graph.config.cache_layout(2, graph.page_size), settings)
    size = builder.temporaries() + builder.state_bytes()
    if store:
        store.save("temporaries", str(size).encode())
    return size


def _settings(
    config: EngineConfig, limits: Limits, model: ModelConfig, *, gpu: bool
) -> ProgramSettings:
    buckets = make_buckets(
        limits.max_num_seqs,
        limits.max_batch_tokens,
        limits.max_pages,
        fine=gpu,
        short=_short_pages(config, model, limits.page_size),
    )
    return ProgramSettings(
        buckets, limits.max_num_seqs, limits.max_model_len, config.max_decode_steps
    )


def _short_pages(config: EngineConfig, model: ModelConfig, page_size: int) -> int | None:
    """Pages of a context that is one chunk to the decode kernel; None where that isn't used."""
    if config.attention not in BY_KERNEL or model.dtype == "float32":
        return None
    try:
        refuse_device()
    except NotImplementedError:
        return None
    return one_chunk_tokens(model.head_dim) // page_size


def environment() -> dict[str, Any]:
    """What every program of this installation on this machine depends on, as plain JSON values."""
    return {**devices.fingerprint(), "source": SOURCE}


def _store(config: EngineConfig, graph: Graph, sizes: dict[str, Any]) -> ArtefactStore | None:
    """Where this engine's executables live; None when artefact_dir is empty or can't be made."""
    root = root_of(config.artefact_dir)
    if root is None:
        return None
    depends_on = {
        **environment(),
        "model": repr(graph.config),
        "attention": graph.attention,
        "block": graph.block,
        "matmul": graph.matmul,
        "mesh": config.mesh,
        "page_size": graph.page_size,
        **sizes,
    }
    try:
        return ArtefactStore(root, depends_on, model=Path(config.model).name)
    except (OSError, ExposedError) as error:
        log.warning("compiled programs are not kept, each start compiles anew: %s", error)
        return None
