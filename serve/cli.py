"""`octavo COMMAND --flags`: each command is one function here; its flags come from the settings."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import define_settings, parse_settings, settings_help

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""

USAGE = """usage: octavo COMMAND [--flags]

  serve      OpenAI-compatible server
  generate   complete prompts:     octavo generate "Once upon a time"
  chat       talk to a model:      octavo chat, or octavo chat "one question"
  batch      answer a file of requests in the OpenAI batch format
  score      log-likelihood of a text file under the model
  build      compile a model's programs ahead of the first start; list, verify, prune them
  convert    write a model as an Orbax or Hugging Face folder
  bench      measure: octavo bench --help
  env        versions, devices, and what is wrong with them

octavo COMMAND --help lists a command's flags. Every one may also stand in a Python config file:
--config=file.py, and --config.field=value overrides a field of it.
"""


@dataclass(frozen=True)
class Command:
    """One command: what it runs, the settings it takes, its own flags and help.

    `extra` names the optional dependencies (octavo[extra]) that it needs.
    """

    run: Callable[[LoadedConfig, flags.FlagValues, list[str]], int]
    settings: tuple[type, ...]
    define: Callable[[flags.FlagValues], None]
    help: str
    extra: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (2 for a usage error)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] != ["bench"]:
        return dispatch("octavo", COMMANDS, USAGE, args)
    from octavo.bench import commands

    benches: Any = commands.COMMANDS  # checkers see this file under two names
    return dispatch("octavo bench", benches, commands.USAGE, args[1:])


def dispatch(program: str, commands: Mapping[str, Command], usage: str, args: list[str]) -> int:
    """Run the command of `commands` that the first argument names; the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage, end="")
        return 0 if args else 2
    command = commands.get(args[0])
    if command is None:
        message = f"{program}: unknown command {args[0]!r}\n\n{usage}"
        print(message, end="", file=sys.stderr)
        return 2
    name = f"{program} {args[0]}"
    if any(arg in ("-h", "--help") for arg in args[1:]):
        print(f"usage: {name} {command.help}\n\n{settings_help(command.settings)}")
        return 0
    return _run(command, name, args)


def _run(command: Command, name: str, args: list[str]) -> int:
    values = flags.FlagValues()
    define_settings(values, command.settings)
    command.define(values)
    try:
        rest = values(args)[1:]
        config = parse_settings(values, command.settings)
    except (flags.Error, ValueError, AttributeError, KeyError, OSError) as error:
        message = " ".join(str(error.args[0] if error.args else error).split())
        print(f"{name}: {message}", file=sys.stderr)
        return 2
    try:
        return command.run(config, values, rest)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader had enough; what is still buffered must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = f"; pip install 'octavo[{command.extra}]'" if command.extra else ""
        print(f"{name}: {error}{extra}", file=sys.stderr)
    return 1


def define_sampling(values: flags.FlagValues) -> None:
    """Sampling flags of generate and chat."""
    flags.DEFINE_integer("max_tokens", None, "tokens to generate", flag_values=values)
    flags.DEFINE_float("temperature", None, "0 is greedy", flag_values=values)
    flags.DEFINE_float("top_p", None, "nucleus mass", flag_values=values)
    flags.DEFINE_integer("top_k", None, "keep the k likeliest", flag_values=values)
    flags.DEFINE_integer("n", None, "samples of each prompt", flag_values=values)
    flags.DEFINE_integer("sampling_seed", None, "seed of the draws", flag_values=values)
    flags.DEFINE_string("system", None, "system message of a chat", flag_values=values)


SAMPLING_HELP = """[TEXT ...] [--flags]

  --max_tokens           tokens to generate; default: 64 in generate, what the context holds in chat
  --temperature          0 is greedy; default: what the model says, else 1
  --top_p, --top_k       draw from the likeliest tokens only
  --n                    samples of each prompt; 1 in chat
  --sampling_seed        seed of the draws
  --system               system message, in chat"""


def sampling_fields(values: flags.FlagValues) -> dict[str, Any]:
    """The sampling flags that were given."""
    names = {"sampling_seed": "seed"}
    wanted = ("max_tokens", "temperature", "top_p", "top_k", "n", "sampling_seed")
    return {names.get(n, n): values[n].value for n in wanted if values[n].present}


def generate(config: LoadedConfig, values: flags.FlagValues, prompts: list[str]) -> int:
    """Complete each prompt (arguments, the config file's, or stdin) under each sampling."""
    from octavo.llm import LLM

    prompts = prompts or list(config.extra.get("prompts", ())) or [sys.stdin.read()]
    llm = LLM(config=config.engine)
    samplings = [dict(s) for s in config.extra.get("sampling", ())] or [{}]
    for fields in samplings:
        params = llm.default_params(**{"max_tokens": 64, **fields, **sampling_fields(values)})
        for output in llm.generate(prompts, params):
            for sample in output.outputs:
                print(json.dumps({**fields, "prompt": output.prompt, **dataclasses.asdict(sample)}))
    return 0


def chat(config: LoadedConfig, values: flags.FlagValues, words: list[str]) -> int:
    """The REPL, or one answer when a question is given."""
    from octavo.serve.chat import Chat

    talk = Chat(config.engine, values["system"].value, sampling_fields(values))
    if words:
        return talk.ask(" ".join(words))
    return talk.repl()


def serve(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """The OpenAI-compatible server, until SIGTERM."""
    if rest:
        raise ValueError(f"serve takes no arguments besides flags, got {rest}")
    from octavo.serve.server import run

    return run(config.engine, config.server)


def batch(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Answer a file of requests in the OpenAI batch format; goes on where a run was killed."""
    import asyncio

    from octavo.serve.offline import run_batch

    if len(paths) != 2:
        raise ValueError("batch needs two files: octavo batch IN.jsonl OUT.jsonl")
    source, target = map(Path, paths)
    names = tuple(values["served_model_name"].value or ())
    at_once = int(values["at_once"].value or 1)
    report = asyncio.run(run_batch(config.engine, source, target, names=names, at_once=at_once))
    print(json.dumps(report.fields()))
    return 0


def _define_batch(values: flags.FlagValues) -> None:
    flags.DEFINE_list("served_model_name", [], "names in model fields", flag_values=values)
    flags.DEFINE_integer("at_once", 512, "in flight", lower_bound=1, flag_values=values)


BATCH_HELP = """IN.jsonl OUT.jsonl [--flags]

  --served_model_name  names that the requests' model fields may have; default: the model's
  --at_once=512        requests in flight"""


def score(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Mean negative log-likelihood and perplexity of each text file."""
    import numpy as np

    from octavo.llm import LLM

    if not paths:
        raise ValueError("score needs at least one text file")
    llm = LLM(config=config.engine)
    for path in paths:
        if llm.tokenizer is None:
            raise ValueError(f"{config.engine.model} has no tokenizer: score reads text")
        ids = llm.tokenizer.encode(Path(path).read_text(encoding="utf-8"))
        if len(ids) < 2:
            raise ValueError(f"{path} holds {len(ids)} tokens; score needs at least 2")
        logits = llm.score(ids).astype(np.float64)[:-1]
        top = logits.max(axis=1)
        totals = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        loss = float((totals - logits[np.arange(len(ids) - 1), ids[1:]]).mean())
        report = {"file": path, "tokens": len(ids), "nll": loss, "perplexity": float(np.exp(loss))}
        print(json.dumps(report))
    return 0


def convert(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Write --model to a folder, as Orbax (default) or Hugging Face safetensors."""
    if len(paths) != 1:
        raise ValueError("convert needs one target folder: octavo convert --model=SOURCE TARGET")
    from octavo.serve import launch

    checkpoint = launch.load(config.engine, to_run=False)
    if values["to"].value == "hf":
        from octavo.model.checkpoint.export import export_hf

        export_hf(checkpoint, Path(paths[0]))
        _export_tokenizer(config, checkpoint.path, Path(paths[0]))
    else:
        from octavo.model.checkpoint.orbax import save

        save(checkpoint, Path(paths[0]))
    print(f"wrote {paths[0]}")
    return 0


def _export_tokenizer(config: LoadedConfig, source: Path, target: Path) -> None:
    """A GGUF's tokenizer in the form that Hugging Face libraries read."""
    from octavo.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.engine.tokenizer or source)
    if tokenizer and not (target / "tokenizer.json").exists():
        tokenizer.save(target)


def build(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """Compile an engine's programs into its artefact, or look after the artefacts there are."""
    from octavo.serve import build as builder

    wanted = [name for name in ("list", "verify", "prune") if values[name].value]
    keep = values["keep"].value
    if rest or len(wanted) > 1 or (keep is not None and wanted != ["prune"]):
        raise ValueError("build takes one of --list, --verify, --prune; --keep goes with --prune")
    if wanted == ["verify"]:
        lines, well = builder.check(config.engine)
        print("\n".join(lines))
        return 0 if well else 1
    if wanted == ["list"]:
        lines = builder.show(config.engine)
    elif wanted == ["prune"]:
        lines = builder.remove(config.engine, keep)
    else:
        lines = [builder.build(config.engine)]
    print("\n".join(lines))
    return 0


def _define_build(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("list", False, "show the artefacts", flag_values=values)
    flags.DEFINE_bool("verify", False, "check them", flag_values=values)
    flags.DEFINE_bool("prune", False, "remove useless ones", flag_values=values)
    flags.DEFINE_integer("keep", None, "newest to keep", lower_bound=0, flag_values=values)


BUILD_HELP = """[--list | --verify | --prune [--keep=N]] [--flags]

  --list      the artefacts in artefact_dir: model, device, programs, size, age
  --verify    digests checked, programs loaded: which are stale, foreign, corrupt, and why
  --prune     remove those that this installation can't use
  --keep      with --prune: remove all but the newest so many, too"""


def env(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """Versions and devices; exit code 1 when something is wrong."""
    from octavo.serve.env import report

    lines, problems = report()
    print("\n".join([*lines, *(f"problem: {line}" for line in problems)]))
    return 1 if problems else 0


def _define_nothing(values: flags.FlagValues) -> None:
    """For commands without flags of their own."""


def _define_convert(values: flags.FlagValues) -> None:
    flags.DEFINE_enum("to", "orbax", ["orbax", "hf"], "target format", flag_values=values)


ENGINE = (EngineConfig,)
COMMANDS = {
    "serve": Command(serve, (EngineConfig, ServerConfig), _define_nothing, "[--flags]", "serve"),
    "generate": Command(generate, ENGINE, define_sampling, SAMPLING_HELP),
    "chat": Command(chat, ENGINE, define_sampling, SAMPLING_HELP),
    "batch": Command(batch, ENGINE, _define_batch, BATCH_HELP, "serve"),
    "score": Command(score, ENGINE, _define_nothing, "FILE ... [--flags]"),
    "build": Command(build, ENGINE, _define_build, BUILD_HELP),
    "convert": Command(convert, ENGINE, _define_convert, "TARGET --to=orbax|hf [--flags]", "orbax"),
    "env": Command(env, (), _define_nothing, ""),
}


if __name__ == "__main__":
    sys.exit(main())
