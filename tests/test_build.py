"""`octavo build`: programs compiled ahead, and the artefacts listed, verified and pruned."""

import gc
import json
import os
from pathlib import Path

import pytest
from family_data import FOLDER

from octavo.serve import cli, inventory
from octavo.serve.artefact import ArtefactStore
from octavo.serve.inventory import artefacts, in_use, prune, verify
from octavo.serve.programs import ProgramBuilder
from octavo.serve.same_kernels import differences
from octavo.serve.timeline import Timeline

GGUF = FOLDER.parent / "gguf" / "tiny-llama-q8_0.gguf"
HERE = {
    "device": "cpu",
    "platform": "cpu",
    "devices": "1",
    "cpu": "ab",
    "jax": "0.11.0",
    "jax_settings": {"jax_enable_x64": "False"},
    "source": "12",
}


def store(root, *, programs=2, written=0, **fields):
    """An artefact with so many programs, for HERE unless `fields` say otherwise."""
    made = ArtefactStore(root, {**HERE, "model": "m", **fields}, model="tiny")
    for index in range(programs):
        made.save(f"forward-{index}", b"program")
    for path in made.folder.iterdir():
        os.utime(path, (written, written))
    return made


def left(root):
    return {one.folder.name for one in artefacts(root)}


# The inventory ----------------------------------------------------------------------------------


def test_an_artefact_is_described(tmp_path):
    made = store(tmp_path, written=1000)
    (one,) = artefacts(tmp_path)
    assert (one.folder, one.about["model"], one.depends_on["jax"]) == (
        made.folder,
        "tiny",
        "0.11.0",
    )
    assert one.programs == ("forward-0", "forward-1")
    assert one.size == sum(path.stat().st_size for path in made.folder.iterdir())
    _, line = inventory.table([one], now=1000 + 7200)
    words = f"{made.folder.name} tiny cpu 0.11.0 2 0.0 2 h in use"
    assert line.split() == words.split()


@pytest.mark.parametrize(
    ("fields", "state", "words"),
    [
        ({}, "usable", ""),
        ({"max_num_seqs": 3}, "usable", ""),
        ({"jax": "0.10.0"}, "stale", "jax is '0.10.0', here '0.11.0'"),
        ({"source": "11"}, "stale", "source is '11', here '12'"),
        (
            {"jax_settings": {"jax_enable_x64": "True"}},
            "stale",
            "jax_settings.jax_enable_x64 is 'True', here 'False'",
        ),
        ({"device": "NVIDIA H200"}, "foreign", "device is 'NVIDIA H200', here 'cpu'"),
        ({"cpu": "cd"}, "foreign", "cpu is 'cd', here 'ab'"),
    ],
)
def test_what_this_installation_cannot_use_is_told_with_the_field(tmp_path, fields, state, words):
    store(tmp_path, **fields)
    (one,) = artefacts(tmp_path)
    assert one.state(HERE) == (state, words)


def damage_file(folder):
    path = folder / "forward-1.bin"
    path.write_bytes(path.read_bytes()[:-1])


def damage_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"jax": "0.11.0"', '"jax": "0.11.1"'))


DAMAGE = {
    "file": (damage_file, "corrupt", "forward-1: its digest does not match"),
    "manifest": (damage_manifest, "corrupt", "manifest.json was changed"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "corrupt", "no manifest.json"),
    "no json": (lambda f: (f / "manifest.json").write_text("{"), "corrupt", "can't be read"),
    "other json": (lambda f: (f / "manifest.json").write_text("[1]"), "corrupt", "lacks `about`"),
    "exposed": (lambda f: f.chmod(0o777), "exposed", "writable by no other"),
}


@pytest.mark.parametrize(("damage", "state", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_what_is_damaged_or_exposed_is_told_with_the_reason(tmp_path, damage, state, words):
    damage(store(tmp_path).folder)
    ((found, reason),) = verify(artefacts(tmp_path), HERE)
    assert found == state
    assert words in reason


def test_a_program_of_another_artefact_is_told(tmp_path):
    made, other = store(tmp_path), store(tmp_path, max_num_seqs=3)
    theirs = (other.folder / "forward-0.bin").read_bytes()
    (made.folder / "forward-0.bin").write_bytes(theirs)
    states = dict(
        zip(
            (one.folder for one in artefacts(tmp_path)),
            verify(artefacts(tmp_path), HERE),
            strict=True,
        )
    )
    assert states[made.folder][0] == "corrupt"
    assert states[other.folder] == ("usable", "")


# Pruning ----------------------------------------------------------------------------------------


def test_prune_removes_what_cannot_be_used_and_nothing_else(tmp_path):
    names = {fields: store(tmp_path, jax=fields).folder.name for fields in ("0.11.0", "0.10.0")}
    odd = [tmp_path / "notes", tmp_path / ("0" * 24)]
    for folder in odd:
        folder.mkdir()
        (folder / "thesis.txt").write_text("x")
    sizes = {one.folder.name: one.size for one in artefacts(tmp_path)}
    (done,) = prune(tmp_path, HERE)
    assert (done.kept, done.artefact.size) == ("", sizes[names["0.10.0"]])
    assert "jax is '0.10.0'" in done.reason
    assert left(tmp_path) == {names["0.11.0"]}
    assert all((folder / "thesis.txt").exists() for folder in odd)


def test_prune_keeps_the_newest_and_the_measurements(tmp_path):
    folders = [store(tmp_path, seqs=n, written=n).folder.name for n in (1, 2, 3)]
    measured = store(tmp_path, programs=0, written=1)
    measured.save("temporaries", b"5")
    done = list(prune(tmp_path, HERE, keep=1))
    assert [one.artefact.folder.name for one in done] == [folders[1], folders[0]]
    assert left(tmp_path) == {folders[2], measured.folder.name}


def test_prune_leaves_what_an_engine_uses(tmp_path):
    made = store(tmp_path, jax="0.10.0")
    assert in_use(made.folder)
    (done,) = prune(tmp_path, HERE)
    assert done.kept == "in use"
    folder = made.folder
    assert folder.exists()
    del made
    assert not in_use(folder)
    (done,) = prune(tmp_path, HERE)
    assert done.kept == ""
    assert not folder.exists()


def test_an_engine_that_starts_under_a_prune_makes_its_folder_anew(tmp_path, monkeypatch):
    """The folder is gone between its making and its locking: the store must not keep a ghost."""
    real, calls = inventory.fcntl.flock, []

    def flock(handle, how):
        if not calls:
            calls.append(how)
            (folder,) = tmp_path.iterdir()
            folder.rmdir()
        real(handle, how)

    monkeypatch.setattr(inventory.fcntl, "flock", flock)
    made = store(tmp_path)
    assert calls
    assert made.load("forward-0") == b"program"


# The command ------------------------------------------------------------------------------------


@pytest.fixture
def octavo(tmp_path, monkeypatch, capsys):
    """Runs `octavo build` on a tiny model, two programs only; its code and what it printed."""
    keys = ProgramBuilder.warmup_keys
    monkeypatch.setattr(ProgramBuilder, "warmup_keys", lambda self: list(keys(self))[:2])
    sizes = ("--max_num_seqs=2", "--max_batch_tokens=32", "--max_model_len=128", "--num_pages=20")

    def run(*args):
        gc.collect()  # an engine of the run before no longer uses its artefact
        code = cli.main(["build", f"--model={GGUF}", f"--artefact_dir={tmp_path}", *sizes, *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_build_compiles_once_and_its_artefacts_are_looked_after(octavo, tmp_path):
    code, out, err = octavo()
    assert code == 0
    assert "2 programs compiled, 0 loaded" in out
    assert "ready in" in out
    assert "compiling" in err, "no progress bar"
    assert "0 programs compiled, 2 loaded" in octavo()[1]
    (folder,) = tmp_path.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["about"]["model"] == GGUF.name
    assert "jax_enable_x64" in manifest["depends_on"]["jax_settings"]
    assert folder.name in octavo("--list")[1]
    assert octavo("--verify")[:2] == (0, f"{folder.name}  usable: 2 programs load\n")
    assert octavo(f"--same_as={tmp_path}")[:2] == (0, f"{folder.name}  0 of 2 programs differ\n")
    program = next(folder.glob("*.bin"))
    size = program.stat().st_size
    program.write_bytes(program.read_bytes()[:-1])
    code, out, _ = octavo("--verify")
    assert code == 1
    assert f"corrupt: {program.stem}" in out
    assert "1 programs compiled, 1 loaded" in octavo()[1], "the damaged one is rebuilt"
    assert program.stat().st_size == pytest.approx(size, rel=0.1)
    code, out, _ = octavo("--prune", "--keep=0")
    assert code == 0
    assert f"removed {folder.name}" in out
    assert list(tmp_path.iterdir()) == []
    assert "no artefacts" in octavo("--list")[1]


class Text:
    """A compiled program of which only the text is known."""

    def __init__(self, text):
        self._text = text

    def as_text(self):
        return self._text


def test_programs_differ_by_their_instructions_not_by_where_they_were_written():
    here = 'FileNames\n1 "a.py"\n  %x = f32[4] add(%a, %b), metadata={op_name="x" stack_frame_id=2}'
    there = here.replace("a.py", "b.py").replace("frame_id=2", "frame_id=7")
    tuned = here.replace("add(%a, %b)", 'add(%a, %b), backend_config={"block_m":"64"}')
    assert differences({"p": Text(here)}, {"p": Text(there)}) == {}
    found = differences({"p": Text(tuned), "q": Text("")}, {"p": Text(here), "r": Text("")})
    assert found.keys() == {"p", "q", "r"}
    assert "1 instructions differ" in found["p"]
    assert '"block_m":"64"' in found["p"]
    assert (found["q"], found["r"]) == ("only here", "only there")


def test_builds_that_cannot_be_compared_are_refused(octavo, tmp_path):
    code, _, err = octavo(f"--same_as={tmp_path / 'other'}")
    assert code == 1
    assert f"same_as: folder {tmp_path / 'other'} does not exist" in err
    (tmp_path / "other").mkdir()
    code, _, err = octavo(f"--same_as={tmp_path / 'other'}")
    assert code == 1
    assert "no artefact in common" in err


@pytest.mark.parametrize(
    "args", [("--list", "--prune"), ("--keep=1",), ("--list", "--keep=1"), ("model",)]
)
def test_flags_that_do_not_go_together_are_refused(octavo, args):
    code, _, err = octavo(*args)
    assert code == 2
    assert "build takes one of" in err


@pytest.mark.parametrize("args", [(), ("--list",), ("--verify",), ("--prune",)])
def test_build_needs_a_place(octavo, args):
    code, _, err = octavo(*args, "--artefact_dir=")
    assert code == 1
    assert "artefact_dir is empty" in err


def test_build_compiles_nothing_where_nothing_can_be_kept(octavo, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.serve.launch.build_engine", lambda *_: pytest.fail("it compiles"))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/octavo")):
        code, _, err = octavo(f"--artefact_dir={folder}")
        assert code == 1
        assert f"nothing can be kept in artefact_dir {folder}: " in err


# The timeline -----------------------------------------------------------------------------------


def test_a_timeline_adds_up():
    times = iter([10.0, 10.5, 13.0])
    timeline = Timeline(2.0, clock=lambda: next(times))
    timeline.ended("device")
    timeline.ended("weights")
    timeline.loaded = 7
    assert timeline.seconds == {"device": 0.5, "weights": 2.5}
    assert str(timeline) == (
        "ready in 3.00 s after 2.00 s of imports: device 0.50, weights 2.50 (0 compiled, 7 loaded)"
    )
