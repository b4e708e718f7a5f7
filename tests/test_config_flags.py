"""Settings: every field is a flag, a config key and a keyword; whatever is mistyped is refused."""

import dataclasses
from pathlib import Path

import pytest
from absl import flags

from octavo.serve import cli
from octavo.serve.config import EngineConfig, ServerConfig, override
from octavo.serve.configfile import load_config_file, typed
from octavo.serve.flags import PROTECTIONS, define_settings, parse_settings

BOTH = (EngineConfig, ServerConfig)
CONFIGS = sorted(Path(__file__).parents[1].glob("configs/[!_]*.py"))
FIELDS = [field for cls in BOTH for field in dataclasses.fields(cls)]

OTHER = {
    "model": "some/path",
    "tokenizer": "elsewhere",
    "load_format": "gguf",
    "generation_config": "none",
    "dtype": "bfloat16",
    "mesh": "tensor=2",
    "attention": "xla",
    "decode_block": "xla",
    "matmul": "xla",
    "max_model_len": 77,
    "page_size": 32,
    "num_pages": 50,
    "kv_fraction": 0.5,
    "max_num_seqs": 3,
    "max_batch_tokens": 64,
    "mixed_tokens": 48,
    "max_decode_steps": 2,
    "decode_wait_ms": 12,
    "max_step_ms": 7.5,
    "overlap": False,
    "prefix_caching": False,
    "ageing_seconds": 1.5,
    "max_waiting": 7,
    "max_waiting_tokens": 7000,
    "max_estimated_wait": 12.5,
    "warmup": "all",
    "artefact_dir": "",
    "seed": 11,
    "progress": True,
    "host": "0.0.0.0",
    "port": 0,
    "served_model_name": ("a", "b"),
    "api_key": "secret",
    "api_key_file": "keys",
    "cors_origins": ("https://a.example", "https://b.example"),
    "tls_cert": "cert.pem",
    "tls_key": "key.pem",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "drain_seconds": 1.0,
    "receive_seconds": 5.0,
    "request_timeout": 2.5,
    "max_body_bytes": 2048,
    "send_seconds": 7.5,
    "watchdog_seconds": 9.0,
    "tool_parser": "mistral",
    "reasoning_parser": "think",
    "pooling": "mean",
    "max_engine_restarts": 5,
    "engine_restart_window": 60.0,
    "api_processes": 2,
    "admin_endpoints": True,
    "log_level": "debug",
}
"""A valid value of every field that is not its default."""


def parse(*args):
    values = flags.FlagValues()
    define_settings(values, BOTH)
    values(["octavo", *args])
    loaded = parse_settings(values, BOTH)
    return {**dataclasses.asdict(loaded.engine), **dataclasses.asdict(loaded.server)}


def spelled(value):
    return ",".join(value) if isinstance(value, tuple) else str(value)


def config_file(folder, **fields):
    lines = [f"    config.{name} = {value!r}" for name, value in fields.items()]
    path = folder / "config.py"
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n"
        "    config = ml_collections.ConfigDict()\n" + "\n".join(lines) + "\n    return config\n"
    )
    return f"--config={path}"


def test_the_table_of_values_is_complete():
    assert set(OTHER) == {field.name for field in FIELDS}
    assert len(FIELDS) == len(OTHER), "two settings share a name"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_setting_is_a_flag_an_override_and_a_key(field, tmp_path):
    value = OTHER[field.name]
    for found in (
        parse(f"--{field.name}={spelled(value)}"),
        parse(f"--config.{field.name}={spelled(value)}"),
        parse(config_file(tmp_path, **{field.name: value})),
    ):
        assert found == {**parse(), field.name: value}
        assert type(found[field.name]) is type(value)
    assert value != field.default


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused(field, tmp_path):
    wrong = object() if isinstance(OTHER[field.name], str) else "no such value"
    with pytest.raises(ValueError, match=f"^{field.name} must be"):
        typed({field.name: wrong})
    with pytest.raises(ValueError, match=f"^{field.name} must be"):
        typed({field.name: 0.5 if isinstance(OTHER[field.name], int) else True})


def test_defaults_without_any_flag():
    found = parse()
    assert all(found[field.name] == field.default for field in FIELDS)


def test_precedence_is_flag_then_override_then_file(tmp_path):
    file = config_file(tmp_path, max_num_seqs=2, max_waiting=20, port=200)
    found = parse(
        "--port=5",
        "--config.port=50",
        file,
        "--config.max_waiting=30",
    )
    assert (found["port"], found["max_waiting"], found["max_num_seqs"]) == (5, 30, 2)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max_model_len=auto", "auto"),
        ("--max_model_len=128", 128),
        ("--config.max_model_len=128", 128),
        ("--seed=", None),
        ("--nooverlap", False),
        ("--served_model_name=one", ("one",)),
        ("--served_model_name=one,two words", ("one", "two words")),
        ("--served_model_name=", ()),
        ("--kv_fraction=1", 1.0),
    ],
)
def test_spellings(flag, value):
    name = flag.removeprefix("--").removeprefix("no").removeprefix("config.").partition("=")[0]
    assert parse(flag)[name] == value


BAD = [
    (["--max_nm_seqs=3"], ["max_nm_seqs", "max_num_seqs"]),
    (["--config.max_nm_seqs=3"], ["config.max_nm_seqs", "config.max_num_seqs"]),
    (["--max_num_seqs=many"], ["max_num_seqs", "'many'", "an integer or auto"]),
    (["--max_num_seqs=0"], ["max_num_seqs", "[1, 4096]", "0"]),
    (["--config.kv_fraction=2"], ["kv_fraction", "[0.01, 1.0]", "2.0"]),
    (["--kv_fraction=nan"], ["kv_fraction", "nan"]),
    (["--overlap=perhaps"], ["overlap", "perhaps"]),
    (["--page_size=48"], ["page_size", "16, 32, 64, 128", "48"]),
    (["--mesh=tensor"], ["mesh", "tensor=N"]),
    (["--dtype=int8"], ["dtype", "bfloat16", "int8"]),
    (["--model="], ["model"]),
    (["--model=a", "--model=b"], ["--model=b", "already defined as a"]),
    (["--lora_modules=sql=/x"], ["lora_modules", "nknown"]),
    (["--seed=-1"], ["seed", "-1"]),
    (["--config=/no/such/file.py"], ["/no/such/file.py", "does not exist"]),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=lambda x: x[0] if x[0][:2] == "--" else "")
def test_mistakes_are_one_line_and_exit_code_2(args, words, capsys):
    assert cli.main(["generate", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo generate: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", PROTECTIONS)
def test_an_empty_protection_is_a_mistake_and_not_none(name, tmp_path, capsys):
    """`--api_key=$KEY` where no KEY is set, say."""
    for arg in (f"--{name}=", f"--config.{name}=", config_file(tmp_path, **{name: ""})):
        assert cli.main(["serve", arg]) == 2
        assert f"{name} is given and empty" in capsys.readouterr().err


def test_an_empty_name_is_refused(capsys):
    assert cli.main(["serve", "--served_model_name=a,,b"]) == 2
    assert "served_model_name holds an empty name" in capsys.readouterr().err


def test_an_unknown_config_key_is_refused_with_a_suggestion(tmp_path, capsys):
    assert cli.main(["serve", config_file(tmp_path, max_num_seq=3)]) == 2
    assert "did you mean max_num_seqs?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", "SyntaxError"),
        ("import no_such_package\n", "no_such_package"),
        ("x = 1\n", "get_config"),
        ("def get_config():\n    return 1 / 0\n", "ZeroDivisionError"),
        ("def get_config():\n    pass\n", "get_config() must return a ConfigDict, not None"),
    ],
)
def test_a_config_file_that_does_not_run_is_named(tmp_path, capsys, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert cli.main(["serve", f"--config={path}"]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert words in err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_repository_loads(path):
    loaded = load_config_file(path)
    assert loaded.engine != EngineConfig()
    assert set(loaded.extra) <= {"prompts", "sampling"}


def test_extra_sections_and_server_settings_load(tmp_path):
    file = config_file(tmp_path, prompts=["a"], sampling=[{"n": 2}], served_model_name=["x"])
    loaded = load_config_file(file.removeprefix("--config="))
    assert loaded.extra == {"prompts": ("a",), "sampling": ({"n": 2},)}
    assert loaded.server.served_model_name == ("x",)


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "score", "convert"])
def test_help_names_every_setting(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for cls in cli.COMMANDS[command].settings:
        for field in dataclasses.fields(cls):
            shown = field.name not in cli.COMMANDS[command].without
            assert (f"--{field.name} " in text) == shown
            assert (field.metadata["help"] in text) == shown


def test_keyword_overrides():
    assert override(EngineConfig(), max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(ValueError, match="did you mean max_num_seqs"):
        override(EngineConfig(), max_num_seq=3)
    with pytest.raises(ValueError, match="known: ageing_seconds"):
        override(EngineConfig(), zzz=3)
    with pytest.raises(ValueError, match="max_num_seqs must be auto or an integer"):
        override(EngineConfig(), max_num_seqs=0)
