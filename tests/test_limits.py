"""Sizes of the engine: `auto` resolved, and what can't fit refused with the arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.serve import devices
from octavo.serve.config import PAGE_SIZES, EngineConfig
from octavo.serve.limits import GIB, Limits, Memory, resolve_limits

MIB = 1 << 20


def memory(limit=100 * GIB, weights=16 * GIB, temporaries=2 * GIB, page=8 * MIB):
    return Memory(limit, weights, temporaries, page)


def limits(mem=None, model_len=8192, *, on_gpu=True, serving=True, **fields):
    config = EngineConfig(**fields)
    return resolve_limits(config, model_len, mem or memory(), on_gpu=on_gpu, serving=serving)


def test_auto_on_a_gpu_fills_the_memory():
    budget = int(100 * GIB * 0.9) - 18 * GIB
    assert limits() == Limits(64, budget // (8 * MIB), 8192, 256, 8192)


def test_more_rows_run_at_once_offline():
    assert limits(serving=False).max_num_seqs == 1024
    assert limits(serving=False, max_num_seqs=8).max_num_seqs == 8
    assert limits(serving=False, on_gpu=False).max_num_seqs == limits(on_gpu=False).max_num_seqs


def test_auto_takes_no_more_pages_than_the_rows_could_use():
    assert limits(max_num_seqs=4).num_pages == 4 * 8192 // 64 + 1


def test_auto_on_a_cpu_takes_a_small_share_but_room_for_one_row():
    small = limits(memory(page=1 * MIB), on_gpu=False)
    assert small == Limits(16, 1024, 8192, 16, 512)
    one_row = limits(memory(page=4 * MIB), on_gpu=False)
    assert one_row.num_pages == 8192 // 16 + 1
    assert one_row.max_model_len == 8192


def test_auto_length_is_what_the_pages_hold():
    assert limits(num_pages=9).max_model_len == 8 * 64
    assert limits(num_pages=9, page_size=16).max_model_len == 8 * 16
    assert limits(max_model_len=100).max_pages == 2


def test_explicit_settings_stand():
    found = limits(
        page_size=32, num_pages=600, max_model_len=1000, max_num_seqs=3, max_batch_tokens=40
    )
    assert found == Limits(32, 600, 1000, 3, 40)


def test_auto_rows_and_tokens_give_way_to_each_other():
    assert limits(max_num_seqs=600, max_batch_tokens=700).max_batch_tokens == 700
    assert limits(max_num_seqs=600, on_gpu=False).max_batch_tokens == 600
    assert limits(max_batch_tokens=8).max_num_seqs == 8


def test_fewer_tokens_than_rows_are_refused():
    with pytest.raises(ValueError, match="max_batch_tokens=4 must be at least max_num_seqs=8"):
        limits(max_batch_tokens=4, max_num_seqs=8)


@pytest.mark.parametrize(
    ("mem", "fields", "numbers"),
    [
        (
            memory(limit=20 * GIB),
            {"num_pages": 1000},
            [
                "num_pages=1000",
                f"1000 pages x {8 * MIB} B = 7.81 GiB",
                "weights 16.00 GiB",
                "temporaries 2.00 GiB",
                "kv_fraction 0.9 x 20.00 GiB = 18.00 GiB",
            ],
        ),
        (
            memory(),
            {"num_pages": 10, "max_model_len": 4096},
            ["max_model_len=4096 needs 65 pages of 64 tokens", "there are 10"],
        ),
        (
            memory(limit=21 * GIB),
            {"max_model_len": 8192},
            ["max_model_len=8192 needs 129 pages", "weights 16.00 GiB", "= 18.90 GiB"],
        ),
        (
            memory(limit=10 * GIB),
            {},
            ["the smallest cache takes 2 pages", "weights 16.00 GiB", "10.00 GiB = 9.00 GiB"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(mem, fields, numbers):
    with pytest.raises(ValueError, match="pages") as refusal:
        limits(mem, **fields)
    for number in numbers:
        assert number in str(refusal.value)


@given(
    limit=st.integers(0, 200 * GIB),
    weights=st.integers(0, 150 * GIB),
    page=st.integers(1, 64 * MIB),
    model_len=st.integers(1, 1 << 20),
    num_pages=st.sampled_from(["auto", 2, 100, 100_000]),
    max_model_len=st.sampled_from(["auto", 1, 1000, 200_000]),
    page_size=st.sampled_from(["auto", *PAGE_SIZES]),
    on_gpu=st.booleans(),
)
def test_whatever_is_accepted_fits(
    limit, weights, page, model_len, num_pages, max_model_len, page_size, on_gpu
):
    fields = {"num_pages": num_pages, "max_model_len": max_model_len, "page_size": page_size}
    mem = Memory(limit, weights, 0, page)
    try:
        found = limits(mem, model_len, on_gpu=on_gpu, **fields)
    except ValueError as refusal:
        text = str(refusal)
    else:
        text = ""
    if text:
        assert "GiB" in text
        assert "-" not in text, "no negative numbers"
        return
    assert found.num_pages * page + weights <= limit * 0.9
    assert 1 <= found.max_model_len <= (found.num_pages - 1) * found.page_size
    assert found.max_pages < found.num_pages
    for name, wanted in fields.items():
        assert wanted in ("auto", getattr(found, name))


def test_host_memory_counts_what_caches_files_and_minds_the_container(tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 900 kB\nMemFree:  100 kB\nMemAvailable:  700 kB\n")
    assert devices.host_memory(meminfo, limit) == 700 * 1024
    limit.write_text("max\n")
    assert devices.host_memory(meminfo, limit) == 700 * 1024
    limit.write_text("4096\n")
    assert devices.host_memory(meminfo, limit) == 4096
    assert devices.host_memory(tmp_path / "absent", tmp_path / "absent") > 0
    assert devices.memory_limit() > GIB / 4
