"""API keys: who may come in, and how much each may ask at once.

Keys are kept as digests, and a given key is compared with every one of them in constant time, so
neither their number of equal characters nor their place in the file shows in the answer's time.
Logs and metrics know a key by its name.
"""

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.serve import errors
from octavo.serve.config import ServerConfig
from octavo.serve.errors import ApiError
from octavo.serve.key_limits import ApiKey, Leave, alone

ENVIRONMENT_KEY = "OCTAVO_API_KEY"
DEFAULT_NAME = "default"
CHECK_SECONDS = 1.0
"""How often the key file is looked at for changes, at most."""
TOO_MANY = 429
MAX_LIMIT_DIGITS = 9
"""Of a number in the file; those of 20 and more would fit no message between processes."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-9;-~]{1,512}")

log = logging.getLogger("octavo.auth")


@dataclass(slots=True)
class KeyUse:
    """One key's requests in this process: those let in since it began, and those that run."""

    requests: int = 0
    running: int = 0


class KeyRing:
    """The keys of a server, from its settings, the environment and a file that may change.

    Without any key everybody may come in. A file that has become unreadable or wrong leaves the
    keys as they were, and is reported once.

    Attributes:
        doorman: who applies the limits.
        refused: requests refused by their key's limits, by the key's name.
    """

    def __init__(
        self,
        config: ServerConfig,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._path = Path(config.api_key_file) if config.api_key_file else None
        self._fixed = _fixed_keys(config, environment)
        self._keys = self._fixed
        self._uses: dict[str, KeyUse] = {}
        self._seen: tuple[int, int, int] | None = None
        self._due = float("-inf")
        self.doorman = alone(clock)
        self.refused: dict[str, int] = {}
        if self._path is not None:
            self._seen = _identity(self._path)
            self._keys = (*self._fixed, *read_keys(self._path))

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._keys)

    def uses(self) -> Iterator[tuple[str, KeyUse]]:
        """Names of the keys that were used, with their use."""
        yield from self._uses.items()

    async def enter(self, given: bytes) -> tuple[str, Leave]:
        """Let a request with this key in: the key's name, and what to call when it is over.

        Raises:
            ApiError: 401 for a key that isn't known, 429 when its limits don't allow it now.
        """
        key = self._known(given)
        use = self._uses.setdefault(key.name, KeyUse())
        try:
            leave = await self.doorman.enter(key)
        except ApiError as error:
            if error.status == TOO_MANY:
                self.refused[key.name] = self.refused.get(key.name, 0) + 1
            raise
        use.requests += 1
        use.running += 1

        def over() -> None:
            use.running -= 1
            leave()

        return key.name, over

    def _known(self, given: bytes) -> ApiKey:
        self._refresh()
        digest, found = _digest(given), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise errors.unauthorized()
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now < self._due:
            return
        self._due = now + CHECK_SECONDS
        before, self._seen = self._seen, None  # None: it can't be looked at
        try:
            self._seen = _identity(self._path)
            if self._seen == before:
                return
            self._keys = (*self._fixed, *read_keys(self._path))
        except ValueError as error:
            if self._seen != before:
                log.error("the API keys stay as they were: %s", error)
            return
        log.info("%d API keys read from %s", len(self._keys), self._path)


def _fixed_keys(config: ServerConfig, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The key of the settings, else of the environment; ValueError for one nobody could send.

    A variable that is there and empty was meant to hold a key.
    """
    name, secret = "api_key", config.api_key
    if not secret:
        if ENVIRONMENT_KEY not in environment:
            return ()
        name, secret = ENVIRONMENT_KEY, environment[ENVIRONMENT_KEY]
    if not _KEY.fullmatch(secret):
        raise ValueError(f"{name} must be 1 .. 512 visible ASCII characters")
    return (ApiKey(DEFAULT_NAME, _digest(secret.encode())),)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file: a line each, NAME:KEY[:REQUESTS_PER_MINUTE[:CONCURRENCY]].

    An empty number is no limit; empty lines and those that begin with # are skipped. ValueError
    names file and line, never the key.
    """
    keys: dict[str, ApiKey] = {}
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"api_key_file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key = _parse_key(line.strip())
        except ValueError as error:
            raise ValueError(f"api_key_file {path}, line {number}: {error}") from None
        if key.name in keys or any(key.digest == other.digest for other in keys.values()):
            raise ValueError(f"api_key_file {path}, line {number}: name or key is there twice")
        keys[key.name] = key
    if not keys:
        raise ValueError(f"api_key_file {path} holds no key")
    return list(keys.values())


def _parse_key(line: str) -> ApiKey:
    name, _, rest = line.partition(":")
    secret, *limits = rest.split(":")
    if not _NAME.fullmatch(name) or name == DEFAULT_NAME:
        raise ValueError(f"a name is 1 .. 64 of A-Z a-z 0-9 . _ - and not {DEFAULT_NAME!r}")
    if not _KEY.fullmatch(secret):
        raise ValueError(f"the key of {name!r} must be 1 .. 512 visible ASCII characters, no colon")
    if len(limits) > 2 or not all(limit == "" or limit.isdecimal() for limit in limits):
        raise ValueError(f"limits of {name!r} are whole numbers: requests a minute, concurrency")
    if any(len(limit) > MAX_LIMIT_DIGITS for limit in limits):
        raise ValueError(f"limits of {name!r} have at most {MAX_LIMIT_DIGITS} digits")
    per_minute, concurrency = (int(limit or 0) for limit in (*limits, "", "")[:2])
    return ApiKey(name, _digest(secret.encode()), per_minute, concurrency)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _identity(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file is rewritten or replaced; ValueError if it can't be found."""
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"api_key_file {path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino
