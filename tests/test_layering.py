"""Every file's imports against the table of docs/architecture.md: who may know whom."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parent.parent
OURS = {
    "cache": set(),
    "sampling": set(),
    "attention": {"cache"},
    "model": {"attention", "cache"},
    "configs": set(),
    "serve": {"cache", "sampling", "attention", "model"},
    "bench": {"cache", "sampling", "attention", "model", "configs", "serve"},
}
STDLIB = set(sys.stdlib_module_names)
DEVICE_EXTERNAL = {"jax", "numpy", "jaxtyping"}
CHECKPOINT_EXTERNAL = {"ml_dtypes", "safetensors", "gguf", "orbax", "huggingface_hub", "tqdm"}
EXTERNAL = {
    "cache": DEVICE_EXTERNAL,
    "sampling": DEVICE_EXTERNAL,
    "attention": DEVICE_EXTERNAL,
    "model": DEVICE_EXTERNAL,
    "configs": {"ml_collections"},
}
HOST_FOLDERS = {"serve", "bench"}
HOST_ONLY = {"os", "io", "time", "threading", "logging", "absl"}
OWN_JITS = {"model/decoder.py": 1, "model/forward.py": 1}
"""Device code's own uses of jax.jit: layers alike, which a program traces and lowers once; and the
whole model as a function for those who call it outside of any program."""
JAX_IN_SERVE = {
    *("step", "compile", "programs", "lowering", "lowering_pool"),
    *("runner", "engine", "inflight", "devices", "launch"),
}
NO_JAX = ["cache.blocks", "cache.prefix", "sampling.params", "sampling.pack", "sampling.flags"]
JAX_FREE_PROCESS = [
    "octavo",
    "octavo.cache.blocks",
    "octavo.cache.prefix",
    "octavo.sampling.params",
    "octavo.sampling.pack",
    "octavo.serve.config",
    "octavo.serve.scheduler",
    "octavo.serve.types",
    "octavo.serve.cli",
    "octavo.bench.commands",
]


def files():
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path):
    """(module, whether at the top of the file) of each import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "octavo":
                yield from (f"octavo.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    folder = path.relative_to(ROOT).parts[0]
    checkpoint = "checkpoint" in path.parts
    device = folder in EXTERNAL and not checkpoint
    for module in imports(path):
        top, *rest = module.split(".")
        if top == "octavo":
            inside_facade = rest and rest[0] in ("llm", "outputs")
            # The command line hands `octavo bench` on; nothing else in serve/ knows bench/.
            handed_on = path.stem == "cli" and rest[:1] == ["bench"]
            assert rest, f"{path} imports the facade"
            allowed = rest[0] == folder or rest[0] in OURS[folder]
            facade = folder in HOST_FOLDERS and inside_facade
            assert allowed or facade or handed_on, f"{path}: {module}"
        elif top in STDLIB:
            assert not (device and top in HOST_ONLY), f"{path}: {module} in a device folder"
        else:
            extra = CHECKPOINT_EXTERNAL if checkpoint else set()
            assert folder in HOST_FOLDERS or top in EXTERNAL[folder] | extra, f"{path}: {module}"
        if top == "jax":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert name not in NO_JAX, f"{path} must stay free of jax"
            assert folder != "serve" or path.stem in JAX_IN_SERVE, f"{path}: jax in the host"


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in files()
        if p.relative_to(ROOT).parts[0] in EXTERNAL and "checkpoint" not in p.parts
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_device_code_does_not_jit(path):
    found = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("jax", "jit")
    ]
    allowed = OWN_JITS.get(str(path.relative_to(ROOT)), 0)
    assert len(found) == allowed, f"{path}: jax.jit in lines {found}, {allowed} allowed"


def test_package_init_files_are_empty():
    for folder in [*OURS, "model/checkpoint"]:
        assert (ROOT / folder / "__init__.py").read_text() == "", folder


def test_host_modules_load_without_jax():
    code = "import sys\n" + "".join(f"import {name}\n" for name in JAX_FREE_PROCESS)
    code += "assert 'jax' not in sys.modules, 'jax was imported'\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_declared_packages_are_those_on_disk():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert declared["project"]["version"] == octavo.__version__
    packages = set(declared["tool"]["setuptools"]["packages"])
    on_disk = {"octavo"} | {
        "octavo." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in OURS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert packages == on_disk
    for folder in OURS:
        link = ROOT / "octavo" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder


def test_files_and_functions_stay_short():
    for path in files():
        source = path.read_text()
        limit = 600 if path.parts[-2] == "attention" else 400
        assert len(source.splitlines()) <= limit, f"{path} has more than {limit} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                most = 150 if path.parts[-2] == "attention" else 50
                assert length <= most, f"{path}:{node.name} has {length} lines"


def test_make_test_gpu_runs_every_module_with_gpu_tests():
    tests = ROOT / "tests"
    marked = {p.name for p in tests.glob("test_*.py") if "pytest.mark.gpu" in p.read_text()}
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "GPU_TESTS =" in x)
    run = {Path(name).name for name in line.split("=")[1].split()}
    assert run == marked - {Path(__file__).name}
