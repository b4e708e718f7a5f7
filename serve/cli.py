"""`octavo COMMAND --flags`: each command is one function here; its flags come from the settings."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from absl import flags

import octavo.serve
from octavo.serve import cli_text
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import UsageError, define_settings, parse_settings, reason_of, settings_help

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
NO_MEMORY = "RESOURCE_EXHAUSTED"
"""How jax's error begins where a device has no room; its type is not imported for that."""

LINES_FAILED = 3
"""Exit code of a batch that has a result for every line, some of them failures."""

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
octavo --version says which version this is.
"""


@dataclass(frozen=True)
class Command:
    """One command: what it runs, the settings it takes, its own flags and help.

    Attributes:
        extra: the optional dependencies (octavo[extra]) that it needs.
        without: fields of the settings that mean nothing to it, so are no flags of it.
    """

    run: Callable[[LoadedConfig, flags.FlagValues, list[str]], int]
    settings: tuple[type, ...]
    define: Callable[[flags.FlagValues], None]
    help: str
    extra: str = ""
    without: frozenset[str] = frozenset()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (2 for a usage error)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        print(f"octavo {octavo.__version__}")
        return 0
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
        near = get_close_matches(args[0], commands, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"{program}: unknown command {args[0]!r}{hint}\n\n{usage}"
        print(message, end="", file=sys.stderr)
        return 2
    name = f"{program} {args[0]}"
    if any(arg in ("-h", "--help") for arg in args[1:]):
        arguments, _, more = command.help.partition("\n")
        settings = settings_help(command.settings, command.without)
        print(f"usage: {name} {arguments}".rstrip(), f"{more}\n\n{settings}".rstrip(), sep="\n")
        return 0
    return _run(command, name, args)


def _run(command: Command, name: str, args: list[str]) -> int:
    values = flags.FlagValues()
    define_settings(values, command.settings, command.without)
    command.define(values)
    try:
        rest = values(args)[1:]
        config = parse_settings(values, command.settings)
    except (flags.Error, ValueError, AttributeError, KeyError, OSError) as error:
        quoted = isinstance(error, KeyError | AttributeError) and error.args
        message = error.args[0] if quoted else reason_of(error)
        print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr)
        return 2
    try:
        return command.run(config, values, rest)
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader had enough; what is still buffered must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{name}: {reason_of(error)}", file=sys.stderr)
    except RuntimeError as error:
        if not str(error).startswith(NO_MEMORY):
            raise
        print(f"{name}: the device has too little memory: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = f"; pip install 'octavo[{command.extra}]'" if command.extra else ""
        print(f"{name}: {error}{extra}", file=sys.stderr)
    return 1


SERVE_HELP = """[--flags]

The OpenAI-compatible server. It answers until SIGTERM or Ctrl-C, then lets running requests end;
a second Ctrl-C ends it at once."""


def serve(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """The OpenAI-compatible server, until SIGTERM."""
    if rest:
        raise UsageError(f"serve takes no arguments besides flags, got {rest}")
    from octavo.serve.server import run

    return run(config.engine, config.server)


def batch(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Answer a file of requests in the OpenAI batch format; goes on where a run was killed."""
    import asyncio

    from octavo.serve.offline import run_batch

    if len(paths) != 2:
        raise UsageError("batch needs two files: octavo batch IN.jsonl OUT.jsonl")
    source, target = map(Path, paths)
    if not source.is_file():
        missing = "is no regular file" if source.exists() else "does not exist"
        raise ValueError(f"IN.jsonl: {source} {missing}")
    if not target.parent.is_dir():
        raise ValueError(f"OUT.jsonl: folder {target.parent} does not exist")
    names = tuple(values["served_model_name"].value or ())
    at_once = int(values["at_once"].value or 1)
    report = asyncio.run(run_batch(config.engine, source, target, names=names, at_once=at_once))
    print(json.dumps(report.fields()))
    return LINES_FAILED if report.failed or report.skipped_failed else 0


def _define_batch(values: flags.FlagValues) -> None:
    flags.DEFINE_list("served_model_name", [], "names in model fields", flag_values=values)
    flags.DEFINE_integer("at_once", 512, "in flight", lower_bound=1, flag_values=values)


BATCH_HELP = """IN.jsonl OUT.jsonl [--flags]

Answers the requests of IN.jsonl, a line each in the OpenAI batch format, and appends the results to
OUT.jsonl. A run that was stopped goes on where it was. Exit code 0: every line has succeeded; 3:
every line has its result, some are failures; 1: the run did not get to its end.

  --served_model_name  names that the requests' model fields may have; default: the model's
  --at_once=512        requests in flight"""


def convert(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Write --model to a folder, as Orbax (default) or Hugging Face safetensors."""
    if len(paths) != 1:
        raise UsageError("convert needs one target folder: octavo convert --model=SOURCE TARGET")
    from octavo.model.checkpoint.orbax import require_free
    from octavo.serve import launch

    require_free(Path(paths[0]))
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
    from octavo.serve.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(config.engine.tokenizer or source)
    if tokenizer and not (target / "tokenizer.json").exists():
        tokenizer.save(target)


def build(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """Compile an engine's programs into its artefact, or look after the artefacts there are."""
    from octavo.serve import build as builder

    wanted = [name for name in ("list", "verify", "prune", "same_as") if values[name].value]
    keep = values["keep"].value
    if rest or len(wanted) > 1 or (keep is not None and wanted != ["prune"]):
        raise UsageError(
            "build takes one of --list, --verify, --prune, --same_as; --keep goes with --prune"
        )
    well = True
    if wanted == ["verify"]:
        lines, well = builder.check(config.engine)
    elif wanted == ["same_as"]:
        lines, well = builder.compare(config.engine, str(values["same_as"].value))
    elif wanted == ["list"]:
        lines = builder.show(config.engine)
    elif wanted == ["prune"]:
        lines = builder.remove(config.engine, keep)
    else:
        lines = [builder.build(config.engine)]
    print("\n".join(lines))
    return 0 if well else 1


def _define_build(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("list", False, "show the artefacts", flag_values=values)
    flags.DEFINE_bool("verify", False, "check them", flag_values=values)
    flags.DEFINE_bool("prune", False, "remove useless ones", flag_values=values)
    flags.DEFINE_string("same_as", "", "folder to compare with", flag_values=values)
    flags.DEFINE_integer("keep", None, "newest to keep", lower_bound=0, flag_values=values)


BUILD_HELP = """[--list | --verify | --prune [--keep=N] | --same_as=DIR] [--flags]

Compiles every program that serving with the same flags can need, so that no start waits for them.

  --list      the artefacts in artefact_dir: model, device, programs, size, age
  --verify    digests checked, programs loaded: which are stale, foreign, corrupt, and why
  --prune     remove those that this installation can't use
  --keep      with --prune: remove all but the newest so many, too
  --same_as   whether another artefact_dir's programs consist of the same kernels"""


def env(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """Versions and devices; exit code 1 when something is wrong."""
    if rest:
        raise UsageError(f"env takes no arguments, got {rest}")
    from octavo.serve.env import report

    lines, problems = report()
    print("\n".join([*lines, *(f"problem: {line}" for line in problems)]))
    return 1 if problems else 0


def _define_nothing(values: flags.FlagValues) -> None:
    """For commands without flags of their own."""


def _define_convert(values: flags.FlagValues) -> None:
    flags.DEFINE_enum("to", "orbax", ["orbax", "hf"], "target format", flag_values=values)


CONVERT_HELP = """TARGET [--flags]

Writes --model to the folder TARGET, which must be new or empty.

  --to=orbax             orbax, or hf: a Hugging Face folder with safetensors"""

ENV_HELP = """

Versions, driver and devices, and what is wrong with them. Exit code 1 if anything is."""

ENGINE = (EngineConfig,)
QUEUE = frozenset(
    {"ageing_seconds", "decode_wait_ms", "max_step_ms"}
    | {"max_waiting", "max_waiting_tokens", "max_estimated_wait"}
)
"""What bounds and orders the waiting of a server's clients."""

DRAWING = QUEUE | {"generation_config", "max_decode_steps", "overlap", "prefix_caching", "seed"}
"""Settings of generation, which score does without."""

RUNNING = frozenset(f.name for f in dataclasses.fields(EngineConfig)) - {
    *("model", "load_format", "dtype", "progress")
}
"""Settings of a running engine, which convert does without."""

COMMANDS = {
    "serve": Command(serve, (EngineConfig, ServerConfig), _define_nothing, SERVE_HELP, "serve"),
    "generate": Command(
        cli_text.generate, ENGINE, cli_text.define_generate, cli_text.GENERATE_HELP, without=QUEUE
    ),
    "chat": Command(cli_text.chat, ENGINE, cli_text.define_chat, cli_text.CHAT_HELP, without=QUEUE),
    "batch": Command(batch, ENGINE, _define_batch, BATCH_HELP, "serve", QUEUE),
    "score": Command(
        cli_text.score, ENGINE, _define_nothing, cli_text.SCORE_HELP, without=DRAWING | {"warmup"}
    ),
    "build": Command(build, ENGINE, _define_build, BUILD_HELP),
    "convert": Command(convert, ENGINE, _define_convert, CONVERT_HELP, "orbax", RUNNING),
    "env": Command(env, (), _define_nothing, ENV_HELP),
}


if __name__ == "__main__":
    sys.exit(main())
