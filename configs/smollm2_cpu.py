"""SmolLM2-135M-Instruct on a laptop CPU.

    octavo serve --config configs/smollm2_cpu.py

Two cores, float32: see the README's table for tokens per second.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The packaged demo model with small buckets."""
    config = ml_collections.ConfigDict()
    config.model = "smollm2"
    config.dtype = "float32"
    config.page_size = 16
    config.max_num_seqs = 8
    config.max_batch_tokens = 512
    config.max_model_len = 2048
    return config
