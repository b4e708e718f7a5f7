"""How wording changes with temperature, on the packaged model.

    octavo generate --config configs/temperature_sweep.py

Runs on two CPU cores in about a minute, compile included. The same seed gives the same texts on
every run, whatever else is in the batch. Expected: temperature 0 repeats itself word for word
across samples; at 1.5 the samples share little.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """One prompt at several temperatures, four samples each."""
    config = ml_collections.ConfigDict()
    config.model = "smollm2"
    config.max_num_seqs = 16
    config.max_model_len = 512
    config.prompts = ["Once upon a time, in a village by the sea,"]
    config.sampling = [
        {"temperature": t, "n": 4, "seed": 7, "max_tokens": 32} for t in (0.0, 0.5, 1.0, 1.5)
    ]
    return config
