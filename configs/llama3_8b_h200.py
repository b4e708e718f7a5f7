"""Llama 3 8B on one H200, bf16.

    octavo serve --config configs/llama3_8b_h200.py --model /path/to/Llama-3.1-8B-Instruct

16 GB of weights leave about 110 GB for KV pages: 850,000 tokens of context in flight.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """One GPU, every bucket compiled at start."""
    config = ml_collections.ConfigDict()
    config.model = "meta-llama/Llama-3.1-8B-Instruct"
    config.dtype = "bfloat16"
    config.page_size = 64
    config.max_num_seqs = 256
    config.max_batch_tokens = 8192
    config.max_model_len = 8192
    config.kv_fraction = 0.92
    config.warmup = "all"
    return config
