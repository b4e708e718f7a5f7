"""`octavo bench WHAT --flags`: every benchmark is a command here."""

from octavo.bench import context, engine, kernel, plots, serve, server_bench, soak, stages, startup
from octavo.serve.cli import Command
from octavo.serve.config import EngineConfig

USAGE = """usage: octavo bench WHAT [--flags]

  kernel      attention, sampling and layer kernels against their floors
  decode      time of a decode step by rows
  prefill     time to the first token by prompt length
  throughput  tokens a second over a mix of requests, offline
  trace       idle share of the device in steady decode, and its kernels by time
  trace_prefill  the kernels of a prefill by time
  pace        what newcomers and running requests wait for one another
  serve       latency and throughput of any OpenAI server, from outside
  load        what the server costs when the engine costs nothing
  soak        mixed traffic on a real server: every answer checked, pages, memory
  startup     process start to first token, cold and warm
  context     one very long prompt: prefill, decode, memory
  all         every recorded figure in resumable stages
  plots       the recorded results as SVG figures

octavo bench WHAT --help lists its flags. Each measurement is one JSON line with date, hardware and
versions, on standard output and appended to --out; a table of them follows on standard error.
"""

ENGINE = (EngineConfig,)
COMMANDS = {
    "kernel": Command(kernel.run, (), kernel.define, kernel.HELP),
    "decode": Command(engine.command("decode"), ENGINE, engine.define, engine.HELP),
    "prefill": Command(engine.command("prefill"), ENGINE, engine.define, engine.HELP),
    "throughput": Command(engine.command("throughput"), ENGINE, engine.define, engine.HELP),
    "trace": Command(engine.command("trace"), ENGINE, engine.define, engine.HELP),
    "trace_prefill": Command(engine.command("trace_prefill"), ENGINE, engine.define, engine.HELP),
    "pace": Command(engine.command("pace"), ENGINE, engine.define, engine.HELP),
    "serve": Command(serve.run, (), serve.define, serve.HELP),
    "load": Command(server_bench.run, (), server_bench.define, server_bench.HELP),
    "soak": Command(soak.run, (), soak.define, soak.HELP),
    "startup": Command(startup.run, ENGINE, startup.define, startup.HELP),
    "context": Command(context.run, ENGINE, engine.define, engine.HELP),
    "all": Command(stages.run, (), stages.define, stages.HELP),
    "plots": Command(plots.run, (), plots.define, plots.HELP, "plots"),
}
