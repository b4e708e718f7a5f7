"""config.json with any value in any field: read, or refused naming the field; nothing else."""

import json
import re

import pytest
from family_data import FOLDER, NAMES

from octavo.model.config import ConfigError
from octavo.model.families import config_from_hf

CONFIGS = {name: json.loads((FOLDER / name / "config.json").read_text()) for name in NAMES}
OTHERS = {
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "quantization_config",
    "query_pre_attn_scalar",
}
ROPE = [{"rope_type": kind, "factor": factor} for kind in ("linear", "zzz") for factor in (0, "x")]
SCALARS = [None, True, False, 0, -1, 3, 1.5, float("inf"), float("nan"), 2**63, 10**30, "", "x"]
VALUES = [*SCALARS, [], [1], ["a"], [[1]], {}, {"a": 1}, *ROPE]


@pytest.mark.parametrize("name", NAMES)
def test_any_value_in_any_field(name):
    for key in CONFIGS[name].keys() | OTHERS:
        for value in VALUES:
            try:
                config_from_hf({**CONFIGS[name], key: value})
            except ConfigError:
                continue


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size must be an integer in 1 .. 2147483647, not '64'"),
        ("vocab_size", True, "vocab_size must be an integer"),
        ("num_hidden_layers", 2**40, "num_hidden_layers must be an integer in 1 .. 65536"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a finite number above 0, not nan"),
        ("tie_word_embeddings", "false", "tie_word_embeddings must be true or false"),
        ("architectures", "LlamaForCausalLM", "architectures must be a list of strings"),
        ("hidden_act", ["silu"], "hidden_act must be a string"),
        ("rope_scaling", "linear", "rope_scaling must be an object, not 'linear'"),
        ("rope_scaling", {"rope_type": "linear", "factor": "2"}, "rope_scaling.factor must be a"),
        ("rope_parameters", {"rope_type": "zzz"}, "rope type 'zzz' is not one of"),
        ("eos_token_id", [2, "x"], "eos_token_id must be a token id or a list of them"),
    ],
)
def test_refusals_name_field_and_range(field, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_hf({**CONFIGS["llama_untied"], field: value})


def test_more_heads_than_dimensions():
    heads = {"num_attention_heads": 10**6, "head_dim": None}
    with pytest.raises(ConfigError, match="hidden_size 64 is too small for 1000000"):
        config_from_hf({**CONFIGS["llama_untied"], **heads})


def test_null_means_the_default():
    plain = CONFIGS["llama_untied"]
    silent = {key: value for key, value in plain.items() if key != "rms_norm_eps"}
    assert config_from_hf({**plain, "rms_norm_eps": None}) == config_from_hf(silent)
