"""Compiled programs on disk: loaded instead of compiled, never trusted when damaged or exposed."""

import errno
import json
import logging
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier, Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ARTEFACTS, run, tiny_config, tiny_engine, tiny_params

from octavo.model.checkpoint.source import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.serve import artefact
from octavo.serve.artefact import ArtefactStore, ExposedError, source_digest
from octavo.serve.compile import Lowerable, ProgramKey, Programs
from octavo.serve.config import EngineConfig
from octavo.serve.launch import assemble
from octavo.serve.types import Request

KEY = ProgramKey("double", size=3)


@pytest.fixture
def store(tmp_path):
    return ArtefactStore(tmp_path, {"a": 1})


def programs(store):
    """One program that doubles three numbers."""
    arg = jax.ShapeDtypeStruct((3,), jnp.int32)
    return Programs(
        lambda key: Lowerable(lambda x: x + x, (arg,)), store, devices=jax.devices()[:1]
    )


def double(made):
    out = made.get(KEY)(jnp.array([1, 2, 3], jnp.int32))
    assert np.asarray(out).tolist() == [2, 4, 6]
    return made.stats


class SlowProgram:
    """Says when two are lowered at once; none ends its compile before two of them are in it."""

    def __init__(self):
        self.lowering, self.together, self.compiling = 0, 0, Barrier(2)

    def lower(self):
        self.lowering += 1
        time.sleep(0.02)
        self.together = max(self.together, self.lowering)
        self.lowering -= 1
        return self

    def compile(self):
        self.compiling.wait(60)
        return object()


def test_programs_are_lowered_one_after_the_other_and_compiled_in_parallel():
    slow = SlowProgram()
    made = Programs(lambda key: slow, devices=jax.devices()[:1])
    made.warm([ProgramKey("double", size=size) for size in range(6)], workers=2)
    assert (slow.together, made.stats.compiled) == (1, 6)
    assert made.stats.lower_seconds >= 6 * 0.02


def file_of(store, name=KEY.name):
    return store.folder / f"{name}.bin"


def test_a_saved_payload_comes_back(store, tmp_path):
    store.save("x", b"payload")
    assert store.load("x") == ArtefactStore(tmp_path, {"a": 1}).load("x") == b"payload"
    assert store.load("y") is None
    assert store.refused == {}
    assert [p.name for p in store.folder.iterdir() if p.suffix not in (".bin", ".json")] == []


def test_another_manifest_is_another_folder(store, tmp_path):
    store.save("x", b"payload")
    other = ArtefactStore(tmp_path, {"a": 2})
    assert other.folder != store.folder
    assert other.load("x") is None


def test_the_folder_is_for_its_owner_alone(store):
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(store, tmp_path, mode):
    store.folder.chmod(mode)
    with pytest.raises(ValueError, match="writable by no other"):
        ArtefactStore(tmp_path, {"a": 1})


@pytest.mark.parametrize(
    ("mode", "own_group", "refused"),
    [
        (0o777, True, True),
        (0o1777, False, False),
        (0o770, False, True),
        (0o770, True, False),
        (0o755, False, False),
    ],
)
def test_a_parent_in_which_others_may_replace_it_is_refused(
    tmp_path, monkeypatch, mode, own_group, refused
):
    monkeypatch.setattr(artefact, "_own_group", lambda group: own_group)
    (tmp_path / "root" / "below").mkdir(parents=True)
    (tmp_path / "root").chmod(mode)
    with pytest.raises(ExposedError, match="root") if refused else nullcontext():
        ArtefactStore(tmp_path / "root" / "below", {"a": 1})


def test_missing_parents_are_made_for_the_owner_alone(tmp_path):
    ArtefactStore(tmp_path / "x" / "y", {"a": 1})
    assert [(tmp_path / p).stat().st_mode & 0o777 for p in ("x", "x/y")] == [0o700] * 2


def test_a_link_in_the_place_of_the_folder_is_refused(store, tmp_path):
    other = ArtefactStore(tmp_path / "other", {"a": 1})
    shutil.rmtree(store.folder)
    store.folder.symlink_to(other.folder)
    with pytest.raises(ExposedError):
        ArtefactStore(tmp_path, {"a": 1})


def test_an_exposed_place_costs_the_store_only(tmp_path, caplog):
    tmp_path.chmod(0o777)
    assert engine(tmp_path / "below").runner.programs.store is None
    assert "could replace" in caplog.text


def test_the_manifest_says_what_the_programs_depend_on(store):
    manifest = json.loads((store.folder / "manifest.json").read_text())
    assert manifest["depends_on"] == {"a": 1}
    assert manifest["about"].keys() == {"model", "made"}


def test_the_field_that_differs_is_named(store, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        ArtefactStore(tmp_path, {"a": 2})
    assert f"{store.folder.name} is not for this engine: a is 1, here 2" in caplog.text


def test_a_changed_manifest_is_refused_with_its_programs(store, tmp_path, caplog):
    store.save("x", b"payload")
    path = store.folder / "manifest.json"
    path.write_text(path.read_text().replace('"a": 1', '"a": 7'))
    with caplog.at_level(logging.WARNING):
        again = ArtefactStore(tmp_path, {"a": 1})
    assert "a is 7, here 1" in caplog.text
    assert again.load("x") is None
    assert '"a": 1' in path.read_text()


def test_a_file_of_another_artefact_is_refused(store, tmp_path):
    other = ArtefactStore(tmp_path, {"a": 2})
    other.save("x", b"theirs")
    for name in ("x", "y"):  # another folder's, and another program's
        file_of(store, name).write_bytes(file_of(other, "x").read_bytes())
        assert store.load(name) is None
        assert "another artefact's" in store.refused[name]


DAMAGE = {
    "truncated": lambda data: data[:-10],
    "without its payload": lambda data: data[:20],
    "empty": lambda data: b"",
    "changed": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "extended": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused_with_the_reason_and_rebuilt(store, caplog, damage):
    assert double(programs(store)).compiled == 1
    whole = file_of(store).read_bytes()
    file_of(store).write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        stats = double(programs(store))
    assert (stats.compiled, stats.loaded) == (1, 0)
    assert "digest does not match" in store.refused[KEY.name]
    assert "rebuilding" in caplog.text
    assert double(programs(store)).loaded == 1, "the rebuilt one was saved"


@pytest.mark.parametrize("payload", [b"no pickle", pickle.dumps(("not", "an", "executable"))])
def test_a_file_that_holds_no_executable_is_rebuilt(store, payload):
    store.save(KEY.name, payload)
    stats = double(programs(store))
    assert (stats.compiled, stats.loaded) == (1, 0)
    assert KEY.name in store.refused


def test_an_unreadable_file_is_rebuilt(store):
    file_of(store).mkdir()
    assert double(programs(store)).compiled == 1
    assert KEY.name in store.refused


def test_a_program_is_compiled_once_and_then_loaded(store):
    made = programs(store)
    assert double(made).compiled == double(made).compiled == 1
    again = double(programs(store))
    assert (again.compiled, again.loaded) == (0, 1)


def test_engines_that_start_together_compile_a_program_once(store):
    """The second asks for it while the first compiles, so it waits and loads."""
    second, asked = programs(store), Event()
    second.on_compile = asked.set
    with ThreadPoolExecutor(1) as pool:
        others = []

        def build(key):
            others.append(pool.submit(double, second))
            assert asked.wait(60)
            return programs(store)._build(key)

        first = Programs(build, store, devices=jax.devices()[:1])
        assert double(first).compiled == 1
        stats = others[0].result()
    assert (stats.compiled, stats.loaded) == (0, 1)
    assert sorted(p.name for p in store.folder.iterdir()) == [f"{KEY.name}.bin", "manifest.json"]


def test_the_lock_of_a_process_that_was_killed_holds_nobody_up(store):
    (store.folder / f"tmp-{KEY.name}.lock").touch()
    assert double(programs(store)).compiled == 1
    assert not list(store.folder.glob("tmp-*"))


@pytest.mark.parametrize("fault", ["stuck", "no locks", "no folder"])
def test_a_lock_that_cannot_be_had_costs_a_second_compile(store, monkeypatch, fault):
    def flock(handle, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(artefact, "BUILD_WAIT_SECONDS", 0.2)
    with store.building(KEY.name) if fault == "stuck" else nullcontext():
        if fault == "no locks":
            monkeypatch.setattr(artefact.fcntl, "flock", flock)
        elif fault == "no folder":
            shutil.rmtree(store.folder)
        assert double(programs(store)).compiled == 1


def test_a_full_disk_costs_the_artefact_and_nothing_else(store, monkeypatch, caplog):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(artefact.os, "replace", full)
        assert double(programs(store)).compiled == 1
    assert "No space left" in caplog.text
    assert [path.name for path in store.folder.iterdir()] == ["manifest.json"]


def test_new_source_is_another_digest(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1")
    first = source_digest([folder])
    assert source_digest([folder]) == first
    (folder / "a.py").write_text("x = 2")
    assert source_digest([folder]) != first
    (folder / "a.py").write_text("x = 1")
    (folder / "b.py").write_text("")
    assert source_digest([folder]) != first


def engine(folder, **fields):
    settings = EngineConfig(
        **{
            "max_num_seqs": 4,
            "max_batch_tokens": 32,
            "max_model_len": 128,
            "num_pages": 33,
            "page_size": 16,
            "artefact_dir": str(folder),
            **fields,
        }
    )
    return assemble(settings, Checkpoint(tiny_config(), tiny_params(), ()))


REQUESTS = [
    Request("a", tuple(range(5, 50)), SamplingParams(temperature=0.0, max_tokens=20)),
    Request("b", (7, 8, 9), SamplingParams(temperature=1.0, seed=3, max_tokens=20)),
]


def test_a_second_engine_compiles_nothing_and_says_the_same():
    expected = run(tiny_engine(), REQUESTS)[0]
    second = engine(ARTEFACTS)
    assert run(second, REQUESTS)[0] == expected
    stats = second.runner.programs.stats
    assert stats.compiled == 0
    assert stats.loaded > 0


def test_other_sizes_are_another_folder(tmp_path):
    folders = {
        engine(tmp_path, **fields).runner.programs.store.folder
        for fields in ({}, {"num_pages": 34}, {"max_decode_steps": 4}, {"page_size": 32})
    }
    assert len(folders) == 4
    assert engine(tmp_path, seed=5).runner.programs.store.folder in folders
    assert engine("").runner.programs.store is None


def test_a_setting_of_jax_that_changes_programs_is_another_folder(tmp_path):
    plain = engine(tmp_path).runner.programs.store.folder
    with jax.default_matmul_precision("highest"):
        assert engine(tmp_path).runner.programs.store.folder != plain
    assert engine(tmp_path).runner.programs.store.folder == plain


def test_a_place_that_cannot_be_made_costs_the_store_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert engine(tmp_path / "file" / "below").runner.programs.store is None
    assert "compiles anew" in caplog.text
