"""Strict settings for every test: warnings are errors, no silent dtype or rank promotion.

Hypothesis draws the same examples in each run and minds no clock, so that a test fails for the
code's sake alone; `pytest --hypothesis-profile=random` looks for new ones.
"""

import contextlib
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax

from octavo.serve.devices import configure_xla

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# As `octavo` itself does it, before jax meets its devices: on a GPU the loops run as users' do.
configure_xla()

with contextlib.suppress(ModuleNotFoundError):  # a GPU's own Python may lack it
    from hypothesis import HealthCheck, settings

    clockless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("random", clockless)
    settings.register_profile("same", clockless, derandomize=True, database=None)
    settings.load_profile("same")

LONGEST = {"test_gpu", "test_smollm2_llm", "test_soak", "test_openai_client", "test_engine"}


def pytest_collection_modifyitems(items):
    """The longest modules first: of two processes none is left with one at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
