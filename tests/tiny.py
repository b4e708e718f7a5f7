"""A two-layer random model for engine tests: compiles in seconds, behaves like the real thing."""

import time
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from octavo.model.checkpoint.source import Checkpoint
from octavo.model.families import config_from_hf, family_of
from octavo.model.params import init_params
from octavo.model.sharding import kv_replicas_for, make_mesh, sharding_tree
from octavo.serve.config import EngineConfig
from octavo.serve.engine import Engine
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import token_source
from octavo.serve.launch import assemble
from octavo.serve.scheduler import Scheduler, SchedulerConfig
from octavo.serve.tokenizer import Tokenizer
from octavo.serve.types import Request

ARTEFACTS = str(Path(__file__).parent.parent / ".cache" / "test-artefacts")
VOCAB = 160
EOS = 3


def tiny_fields(**fields):
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        **fields,
    }


def tiny_config(**fields):
    return config_from_hf(tiny_fields(**fields))


@cache
def tiny_params():
    config = tiny_config()
    return init_params(family_of(config).abstract_params(config), jax.random.key(5))


@cache
def tiny_tokenizer():
    """The printable ASCII characters, a line break and pieces of JSON, in GPT-2's spelling."""
    specials = ["<unk>", "<s>", "<pad>", "</s>"]
    pieces = [*map(chr, range(33, 127)), "Ġ", "Ċ", '{"', '":', '",', 'Ġ"', "Ġ{", "true", "false"]
    pieces += ["null", '"}', "}}", "[]", "ab", "ba", "aa", "name", "Ġa", "yes", "no", "00", "12"]
    vocab = {piece: i for i, piece in enumerate(specials + pieces)}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, eos_ids=(EOS,))


def tiny_source():
    return token_source(tiny_tokenizer, VOCAB, (EOS,))


@cache
def tiny_tokens():
    """The tokenizer as grammars use it."""
    return tiny_source().tokenizer()


NUM_PAGES = 33
PAGE_SIZE = 16


@cache
def tiny_runner(tensor=1):
    """The one runner that tests share, so that its programs are compiled once."""
    settings = EngineConfig(
        mesh=f"tensor={tensor}" if tensor > 1 else "",
        max_num_seqs=4,
        max_batch_tokens=32,
        max_model_len=128,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        artefact_dir=ARTEFACTS,
    )
    config, params = tiny_config(), tiny_params()
    if tensor > 1:
        config, params = sharded(tensor)
    return assemble(settings, Checkpoint(config, params, ())).runner


def sharded(tensor):
    """The tiny model over virtual devices; KV heads are held twice where there are too few."""
    config, mesh = tiny_config(), make_mesh(tensor)
    replicas = kv_replicas_for(config, tensor)
    wide = config.with_kv_replicas(replicas)
    params = dict(tiny_params())
    params["layers"] = tuple(replicate_heads(layer, config, replicas) for layer in params["layers"])
    specs = family_of(wide).abstract_params(wide)
    return wide, jax.device_put(params, sharding_tree(specs, mesh))


def replicate_heads(layer, config, replicas):
    """A layer whose KV heads are each held `replicas` times, with fewer query heads each."""
    heads, small = config.num_kv_heads * replicas, config.group_size // replicas
    q = layer["qkv"][:, :, : config.group_size].reshape(-1, heads, small, config.head_dim)
    kv = jnp.repeat(layer["qkv"][:, :, config.group_size :], replicas, axis=1)
    out = layer["out"].reshape(heads, small, config.head_dim, -1)
    return {**layer, "qkv": jnp.concatenate([q, kv], axis=2), "out": out}


def tiny_engine(*, eos_ids=(), params=None, tensor=1, clock=time.monotonic, **fields):
    """A fresh engine on the shared runner; `fields` are SchedulerConfig's."""
    runner = tiny_runner(tensor)
    runner.reset_device_state()
    runner.params = params or (tiny_params() if tensor == 1 else runner.params)
    settings = {
        "max_num_seqs": 4,
        "max_batch_tokens": 32,
        "max_model_len": 128,
        "num_pages": NUM_PAGES,
        "page_size": PAGE_SIZE,
        "max_decode_steps": 8,
        "overlap": True,
        **fields,
    }
    return Engine(
        runner,
        Scheduler(SchedulerConfig(**settings)),
        max_model_len=settings["max_model_len"],
        eos_ids=eos_ids,
        grammars=Grammars(tiny_tokens, VOCAB, eos_ids),
        overlap=settings["overlap"],
        seed=0,
        clock=clock,
    )


def run(engine, requests: list[Request], *, every_step=lambda engine: None):
    """Tokens and last event of each request, by id."""
    for request in requests:
        engine.add(request)
    return drain(engine, every_step=every_step)


def drain(engine, *, every_step=lambda engine: None):
    tokens, last = {}, {}
    steps = 0
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            last[event.request_id] = event
        every_step(engine)
        steps += 1
        assert steps < 5000, "no progress"
    return tokens, last
