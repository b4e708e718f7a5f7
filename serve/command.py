"""How a module of this package is run as a process of its own."""

import sys


def command_of(module: str) -> list[str]:
    """`python -m MODULE`, for which a folder named octavo where it is started isn't the package."""
    return [sys.executable, "-P", "-m", module]
