"""`octavo env`: versions and devices, and one clear line for each thing that is wrong."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "octavo",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "numpy",
    "tokenizers",
)
CUDA_DRIVERS = {"jax-cuda12-plugin": (525, "12"), "jax-cuda13-plugin": (580, "13")}
"""Oldest NVIDIA driver (major) of each CUDA plugin, and its CUDA version."""


def report() -> tuple[list[str], list[str]]:
    """Lines that describe this machine, and the problems found."""
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    driver, gpus = _nvidia()
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {found}" for name, found in versions.items()]
    lines += [f"nvidia driver {driver}: {', '.join(gpus)}"] if driver else ["no nvidia driver"]
    problems = check(versions, driver)
    try:
        from octavo.serve import devices

        lines.append("jax devices: " + ", ".join(devices.kinds()))
        if driver and gpus and not devices.on_gpu() and not problems:
            problems.append("jax runs on the CPU although a GPU is here; see its warning above")
    except (ImportError, RuntimeError) as error:
        problems.append(f"jax does not start: {error}")
    return lines, problems


def check(versions: dict[str, str], driver: str) -> list[str]:
    """What is wrong with these versions under this driver ("" for none)."""
    if "jax" not in versions:
        return ["jax is not installed: pip install octavo"]
    problems = []
    if not (0, 11) <= _pair(versions["jax"]) < (0, 13):
        problems.append(f"jax {versions['jax']} is installed; octavo needs >= 0.11, < 0.13")
    plugins = [name for name in CUDA_DRIVERS if name in versions]
    if driver and not plugins:
        problems.append(
            "a GPU is here but no CUDA plugin: pip install 'octavo[cuda13]' (or cuda12)"
        )
    if len(plugins) > 1:
        problems.append("both CUDA plugins are installed: keep one of cuda12 and cuda13")
    for name in plugins:
        needed, cuda = CUDA_DRIVERS[name]
        if driver and int(driver.split(".")[0]) < needed:
            problems.append(f"driver {driver} is older than CUDA {cuda} needs: {needed} or newer")
    for name in ("jaxlib", *plugins):
        if name in versions and _pair(versions[name]) != _pair(versions["jax"]):
            problems.append(f"{name} {versions[name]} does not match jax {versions['jax']}")
    return problems


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _nvidia() -> tuple[str, list[str]]:
    """Driver version and GPU names as nvidia-smi tells them; "" and [] without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "", []
    rows = [line.split(", ", 1) for line in out.strip().splitlines()]
    return (rows[0][0], [row[-1] for row in rows]) if rows else ("", [])
