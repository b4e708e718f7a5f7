"""The command line: commands, their exit codes, `octavo env`, and the terminal conversation."""

import builtins
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from family_data import FOLDER, reference_of
from jax.errors import JaxRuntimeError
from tiny import ARTEFACTS

import octavo as package
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.forward import forward
from octavo.outputs import CompletionOutput
from octavo.sampling.params import SamplingParams
from octavo.serve import chat, cli, env, launch, supervisor
from octavo.serve.chat import Chat
from octavo.serve.cli_text import COMPILING
from octavo.serve.config import EngineConfig
from octavo.serve.types import EngineStats

GGUF = FOLDER.parent / "gguf" / "tiny-llama-q8_0.gguf"
SIZES = [
    "--max_num_seqs=2",
    "--max_batch_tokens=32",
    "--max_model_len=128",
    "--num_pages=20",
    f"--artefact_dir={ARTEFACTS}",
]


def octavo(*args):
    return cli.main([*args, *SIZES])


# Commands ---------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: octavo {name}")


def test_an_unknown_command_is_a_usage_error(capsys):
    assert cli.main(["serv"]) == 2
    assert "unknown command 'serv'; did you mean 'serve'?" in capsys.readouterr().err
    assert cli.main(["bench", "decod"]) == 2
    assert "unknown command 'decod'; did you mean 'decode'?" in capsys.readouterr().err
    assert cli.main(["nothing-like-it"]) == 2
    assert capsys.readouterr().err.startswith("octavo: unknown command 'nothing-like-it'\n")


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {package.__version__}\n"


def test_the_installed_command_starts_without_jax():
    code = (
        "import sys; from octavo.serve import cli; "
        "sys.exit(cli.main(['--help']) or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: octavo" in done.stdout


def test_generate_writes_a_json_line_a_sample(capsys):
    args = ["hello world", "once", "--max_tokens=5", "--temperature=0", "--n=2"]
    assert octavo("generate", f"--model={GGUF}", *args) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["prompt"], x["index"]) for x in lines] == [
        (prompt, index) for prompt in args[:2] for index in (0, 1)
    ]
    assert all(len(x["token_ids"]) <= 5 and x["finish_reason"] for x in lines)
    assert lines[0]["text"] == lines[1]["text"]


def test_generate_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello world\n"))
    assert octavo("generate", f"--model={GGUF}", "--max_tokens=2", "--temperature=0") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "hello world"


def test_compiling_is_announced_once(tmp_path, capsys):
    args = ["generate", f"--model={GGUF}", "a", "--max_tokens=2", "--temperature=0", *SIZES]
    for times in (1, 0):
        assert cli.main([*args, f"--artefact_dir={tmp_path}"]) == 0
        captured = capsys.readouterr()
        assert captured.err.count(COMPILING) == times
        assert len(captured.out.splitlines()) == 1


def test_generate_runs_the_samplings_of_an_experiment(tmp_path, capsys):
    path = tmp_path / "sweep.py"
    sampling = [{"temperature": t, "seed": 1, "max_tokens": 2} for t in (0.0, 1.0)]
    path.write_text(
        f"def get_config():\n    return {{'prompts': ['a', 'b'], 'sampling': {sampling}}}\n"
    )
    assert octavo("generate", f"--model={GGUF}", f"--config={path}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["temperature"], x["prompt"]) for x in lines] == [
        (0.0, "a"),
        (0.0, "b"),
        (1.0, "a"),
        (1.0, "b"),
    ]
    assert octavo("generate", f"--model={GGUF}", f"--config={path}", "--temperature=0.5") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {x["temperature"] for x in lines} == {0.5}, "what a flag overrides is told as it ran"


def test_score_is_the_mean_loss_of_the_forward_pass(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("hello world, hello again")
    assert octavo("score", f"--model={GGUF}", str(text)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == str(text)
    assert report["perplexity"] == pytest.approx(np.exp(report["nll"]))
    assert 2 < report["tokens"] < 30


FAILURES = [
    (["generate", "--model=/no/such/model", "x"], "no model at '/no/such/model': that path does"),
    (["generate", f"--model={GGUF}", "--tokenizer=/no/such", "x"], "tokenizer '/no/such' does"),
    (["generate", f"--model={FOLDER / 'llama_tied'}", "x"], "no tokenizer"),
    (["generate", f"--model={GGUF}", "--attention=mosaic", "x"], "mosaic"),
    (["generate", f"--model={GGUF}", "--decode_block=mosaic", "x"], "decode_block=mosaic: not for"),
    (["generate", f"--model={GGUF}", "--decode_block=triton", "x"], "decode_block=triton: not for"),
    (["generate", f"--model={GGUF}", "--matmul=mosaic", "x"], "matmul=mosaic: not for dtype"),
    (["generate", f"--model={GGUF}", "--mesh=tensor=99", "x"], "99 devices"),
    (["chat", f"--model={FOLDER / 'llama_tied'}"], "no chat template"),
]


@pytest.mark.parametrize(("args", "words"), FAILURES, ids=lambda x: " ".join(x)[:40])
def test_failures_are_one_line_and_exit_code_1(args, words, capsys):
    assert octavo(*args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith(f"octavo {args[0]}: ")
    assert words in line


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test: what is wrong must be said before."""

    def load(*args, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(supervisor.CoreSupervisor, "start", load)


USAGE = [
    (["score"], "at least one text file"),
    (["generate", "--temperature=-1", "x"], "temperature"),
    (["generate", "--system=x", "y"], "system"),
    (["chat", "--top_p=0", "x"], "top_p"),
    (["chat", "--n=2", "x"], "'n'"),
    (["serve", "x"], "no arguments"),
    (["convert"], "one target folder"),
    (["convert", "a", "b"], "one target folder"),
    (["convert", "--to=zip", "a"], "zip"),
    (["convert", "--max_num_seqs=3", "a"], "max_num_seqs"),
    (["batch", "in.jsonl"], "two files"),
    (["batch", "--at_once=0", "a", "b"], "at_once"),
    (["score", "--max_waiting=3", "x"], "max_waiting"),
    (["build", "--list", "--prune"], "one of"),
    (["env", "x"], "no arguments"),
    (["bench", "context", "x"], "no arguments"),
    (["bench", "decode", "x"], "'x'"),
    (["bench", "kernel", "x"], "'x'"),
    (["bench", "load", "x"], "x"),
    (["bench", "startup", "x"], "x"),
    (["bench", "plots", "x"], "no arguments"),
    (["bench", "all", "x"], "'x'"),
    (["bench", "serve", "x"], "no arguments"),
    (["bench", "serve"], "--rates or --concurrency"),
    (["serve", f"--config={FOLDER}"], f"config file {FOLDER} is no file"),
]


@pytest.mark.parametrize(("args", "words"), USAGE, ids=lambda x: " ".join(x)[:40])
def test_usage_errors_are_one_line_and_exit_code_2(no_model, args, words, capsys):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"octavo {args[0]}")
    assert err.count("\n") == 1
    assert words in err


def test_no_prompt_in_a_terminal_is_a_usage_error(no_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"", 2, "no prompt: standard input is empty"),
        (b"\n", 2, "no prompt: standard input is empty"),
        (b"\xff", 1, "standard input is not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_is_read_before_a_model_is_loaded(
    no_model, monkeypatch, capsys, raw, code, words, errors
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "utf-8", errors))
    assert cli.main(["generate"]) == code
    assert capsys.readouterr().err == f"octavo generate: {words}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["score", "/no/such"], "FILE /no/such: No such file or directory"),
        (["score", "."], "FILE .: Is a directory"),
        (["score", "full/x"], "full/x is not UTF-8 text"),
        (["batch", "/no/such", "out"], "IN.jsonl: /no/such does not exist"),
        (["batch", ".", "out"], "IN.jsonl: . is no regular file"),
        (["batch", "/dev/null", "out"], "IN.jsonl: /dev/null is no regular file"),
        (["batch", "in.jsonl", "/no/such/out"], "OUT.jsonl: folder /no/such does not exist"),
        (["batch", "in.jsonl", "full"], "full is no file"),
        (["batch", "in.jsonl", "full/x"], "full/x, line 1 is no batch result"),
        (["convert", "full"], "full exists and is not an empty folder"),
        (["convert", "in.jsonl"], "in.jsonl exists and is not an empty folder"),
        (["build", "--artefact_dir=in.jsonl/x"], "artefact_dir in.jsonl/x: Not a directory"),
        (["build", "--same_as=/no/such"], "same_as: folder /no/such does not exist"),
        (["bench", "throughput", "--workload=/no/such"], "workload /no/such: No such file"),
        (["bench", "throughput", "--workload=mix.jsonl"], "mix.jsonl: throughput reads prompts"),
        (["bench", "serve", "--rates=1", "--workload=/no/such"], "workload /no/such: No such"),
        (["bench", "context", "--model=/no/such"], "no model at '/no/such': that path does not"),
        (["bench", "context", f"--model={GGUF}"], "config.json does not exist"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_files_are_looked_at_before_a_model_is_loaded(
    no_model, tmp_path, monkeypatch, args, words, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"\xff\xff")
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "mix.jsonl").write_text('{"messages": [], "max_tokens": 1}\n')
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"octavo {args[0]}")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampling": [{"temprature": 1}]}, "temprature"),
        ({"sampling": [{"temperature": -1}]}, "temperature"),
        ({"sampling": {"temperature": 1}}, "sampling must be a list"),
        ({"prompts": "abc"}, "prompts must be a list"),
        ({"prompts": [1]}, "prompts must be a list"),
    ],
)
def test_an_experiment_is_looked_at_before_a_model_is_loaded(
    no_model, tmp_path, capsys, sections, words
):
    path = tmp_path / "experiment.py"
    path.write_text(f"def get_config():\n    return {sections}\n")
    assert cli.main(["generate", f"--config={path}", "x"]) == 2
    assert words in capsys.readouterr().err


def test_help_lists_a_command_s_own_flags_only(capsys):
    shown = {}
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        shown[name] = capsys.readouterr().out
    assert len(shown["convert"].splitlines()) < 12
    assert "--max_waiting" in shown["serve"]
    for name in ("generate", "chat", "batch", "score", "convert", "env"):
        assert "--max_waiting" not in shown[name]
    assert "--system" in shown["chat"]
    assert "--system" not in shown["generate"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_line_editing(talk, monkeypatch, terminal):
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.delitem(sys.modules, "readline")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    converse(talk, monkeypatch)
    assert ("readline" in sys.modules) == terminal


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("No module named 'fastapi'"), 1, "octavo[serve]"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes"), 1, "too little memory: RESOURCE_EXHAUST"),
    ],
)
def test_interrupts_and_missing_extras(monkeypatch, capsys, error, code, words):
    def fail(*args):
        raise error

    command = cli.COMMANDS["serve"]
    changed = cli.Command(fail, command.settings, command.define, command.help, command.extra)
    monkeypatch.setitem(cli.COMMANDS, "serve", changed)
    assert cli.main(["serve"]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == bool(words)


def test_an_error_that_nobody_expects_keeps_its_traceback(monkeypatch):
    def fail(*args):
        raise JaxRuntimeError("INTERNAL: a defect")

    monkeypatch.setitem(cli.COMMANDS, "serve", replace(cli.COMMANDS["serve"], run=fail))
    with pytest.raises(JaxRuntimeError, match="INTERNAL"):
        cli.main(["serve"])


@pytest.mark.parametrize("target", ["orbax", "hf"])
def test_convert_and_load_again(tmp_path, capsys, target):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FOLDER / "llama_tied" / name, source / name)
    out = tmp_path / "out"
    assert cli.main(["convert", f"--model={source}", f"--to={target}", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    again = load_checkpoint(out)
    assert again.format == target
    prompt = reference_of("llama_tied")[0][1]
    logits = forward(again.config, again.params, np.array(prompt.ids, np.int32))
    np.testing.assert_allclose(logits, prompt.logits, atol=1e-4 * prompt.logits.std())


# octavo env -------------------------------------------------------------------------------------

GOOD = {"jax": "0.11.2", "jaxlib": "0.11.2"}


@pytest.mark.parametrize(
    ("versions", "driver", "problems"),
    [
        (GOOD, "", []),
        (GOOD | {"jax-cuda13-plugin": "0.11.2"}, "580.65.06", []),
        (GOOD | {"jax-cuda12-plugin": "0.11.2"}, "550.90.07", []),
        (GOOD, "580.65.06", ["no CUDA plugin"]),
        (GOOD | {"jax-cuda13-plugin": "0.11.2"}, "570.1", ["570.1", "580 or newer"]),
        (GOOD | {"jax-cuda12-plugin": "0.11.2"}, "470.82", ["470.82", "525 or newer"]),
        (GOOD | {"jax-cuda13-plugin": "0.10.0"}, "580.65", ["0.10.0 does not match jax 0.11.2"]),
        (GOOD | {"jaxlib": "0.10.0"}, "", ["jaxlib 0.10.0 does not match jax 0.11.2"]),
        ({"jax": "0.10.1", "jaxlib": "0.10.1"}, "", ["jax 0.10.1", ">= 0.11"]),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, "", ["jax 0.13.0", "< 0.13"]),
        (
            GOOD | {"jax-cuda12-plugin": "0.11.2", "jax-cuda13-plugin": "0.11.2"},
            "580.65",
            ["both CUDA plugins"],
        ),
        ({}, "", ["jax is not installed"]),
    ],
)
def test_env_names_each_problem_on_one_line(versions, driver, problems):
    found = env.check(versions, driver)
    assert len(found) == bool(problems)
    for words in problems:
        assert words in found[0]
        assert "\n" not in found[0]


def test_env_prints_versions_and_devices(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for words in ("python 3.", "jax 0.", "octavo 0.", "jax devices: cpu"):
        assert words in text


def test_env_fails_where_something_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(env, "_nvidia", lambda: ("470.82", ["NVIDIA H200"]))
    assert cli.main(["env"]) == 1
    assert "problem: " in capsys.readouterr().out


# The conversation -------------------------------------------------------------------------------


class FakeTokenizer:
    chat_template = "yes"

    def encode_chat(self, messages):
        return [1] * sum(len(message["content"]) for message in messages)


class FakeLLM:
    """Answers with scripted items; an exception among them is raised."""

    def __init__(self, config):
        self.config = config
        self.tokenizer = FakeTokenizer()
        self.engine = SimpleNamespace(stats=lambda: EngineStats(pages_used=3, pages_total=9))
        self.script = ["Hello", " you"]
        self.closed = 0

    def default_params(self, **fields):
        return SamplingParams(**fields)

    def stream(self, ids, params):
        try:
            for item in self.script:
                if isinstance(item, BaseException):
                    raise item
                yield item if isinstance(item, CompletionOutput) else self.item(item)
        finally:
            self.closed += 1

    def item(self, text, **fields):
        return CompletionOutput(0, text, (5,), **fields)


@pytest.fixture
def talk(monkeypatch):
    monkeypatch.setattr(chat, "LLM", FakeLLM)
    return Chat(EngineConfig(), None, {}, out=io.StringIO())


def converse(talk, monkeypatch, *lines):
    """Feed lines to the REPL, and Ctrl-D; what it printed."""
    script = iter(lines)

    def read(prompt):
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)
    assert talk.repl() == 0
    return talk._out.getvalue()


def roles(talk):
    return [message["role"] for message in talk.messages]


def test_an_answer_streams_and_joins_the_history(talk, monkeypatch):
    text = converse(talk, monkeypatch, "Hi", "", "Again")
    assert text.count("Hello you\n[") == 2
    assert "2 prompt tokens" in text
    assert roles(talk) == ["user", "assistant"] * 2
    assert talk.messages[1]["content"] == "Hello you"


def test_reset_keeps_the_system_message_and_system_replaces_it(talk, monkeypatch):
    converse(talk, monkeypatch, "/system Be brief.", "Hi", "/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    converse(talk, monkeypatch, "/system  Be long. ", "Hi")
    assert [m["content"] for m in talk.messages] == ["Be long.", "Hi", "Hello you"]
    converse(talk, monkeypatch, "/system")
    assert talk.messages == []


def test_stats_and_help(talk, monkeypatch):
    text = converse(talk, monkeypatch, "/stats", "Hi", "/stats", "/help", "/nonsense")
    assert "no answer yet" in text
    assert text.count("pages 3/9") == 2
    assert text.count("tokens/s") == 2
    assert text.count("/reset          forget") == 2


def test_ctrl_c_stops_the_answer_only(talk, monkeypatch):
    talk.llm.script = ["Hel", KeyboardInterrupt()]
    text = converse(talk, monkeypatch, KeyboardInterrupt(), "Hi", "/stats")
    assert "Hel [stopped]\n" in text
    assert talk.messages[-1] == {"role": "assistant", "content": "Hel"}
    assert talk.llm.closed == 1
    assert "pages 3/9" in text, "the conversation goes on"


def test_a_refused_message_leaves_the_conversation_as_it_was(talk, monkeypatch):
    talk.llm.script = [ValueError("the prompt has 9 tokens; the context holds 8")]
    text = converse(talk, monkeypatch, "Hi", "/exit", "never read")
    assert "the context holds 8; /reset starts over" in text
    assert talk.messages == []


def test_one_question_exits_with_the_answers_state(talk, capsys):
    assert talk.ask("Hi") == 0
    talk.llm.script = ["Hel", talk.llm.item("", finish_reason="error", error="NaN logits")]
    assert talk.ask("Hi") == 1
    assert "octavo chat: NaN logits" in capsys.readouterr().err


def test_chat_answers_one_question_and_a_piped_conversation(capsys, monkeypatch):
    args = ["chat", f"--model={GGUF}", "--max_tokens=4", "--temperature=0"]
    assert octavo(*args, "hello", "world") == 0
    assert "tokens/s]" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\nhello\n"))
    assert octavo(*args) == 0
    assert capsys.readouterr().out.count("tokens/s]") == 2
