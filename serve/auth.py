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

ENVIRONMENT_KEY = "OCTAVO_API_KEY"
DEFAULT_NAME = "default"
CHECK_SECONDS = 1.0
"""How often the key file is looked at for changes, at most."""
CONCURRENCY_RETRY_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-9;-~]{1,512}")

log = logging.getLogger("octavo.auth")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `per_minute` and `concurrency` are its requests at most; 0 is no limit."""

    name: str
    digest: bytes
    per_minute: int = 0
    concurrency: int = 0


class KeyUse:
    """What one key's holder is using. A minute's allowance refills evenly and may be spent at once.

    Attributes:
        running: requests that have not been answered whole.
        requests: requests let in since start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent = 0.0
        self._since = clock()
        self.running = 0
        self.requests = 0

    def enter(self, key: ApiKey) -> None:
        """Count a request in; ApiError 429 when the key's limits don't allow it now."""
        if key.concurrency and self.running >= key.concurrency:
            text = f"API key {key.name!r} has {self.running} requests running, its limit"
            raise errors.overloaded(text, CONCURRENCY_RETRY_SECONDS)
        if key.per_minute:
            now, rate = self._clock(), key.per_minute / 60
            self._spent = max(0.0, self._spent - (now - self._since) * rate)
            self._since = now
            if self._spent + 1 > key.per_minute:
                text = f"API key {key.name!r} may send {key.per_minute} requests a minute"
                raise errors.overloaded(text, (self._spent + 1 - key.per_minute) / rate)
            self._spent += 1
        self.running += 1
        self.requests += 1

    def leave(self) -> None:
        """A request that was let in has been answered."""
        self.running -= 1


class KeyRing:
    """The keys of a server, from its settings, the environment and a file that may change.

    Without any key everybody may come in. A file that has become unreadable or wrong leaves the
    keys as they were, and is reported once.

    Attributes:
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
        secret = config.api_key or environment.get(ENVIRONMENT_KEY, "")
        self._fixed = (ApiKey(DEFAULT_NAME, _digest(secret.encode())),) if secret else ()
        self._keys = self._fixed
        self._uses: dict[str, KeyUse] = {}
        self._seen: tuple[int, int, int] | None = None
        self._due = float("-inf")
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

    def enter(self, given: bytes) -> tuple[str, KeyUse]:
        """Let a request with this key in: the key's name and its use, which must be left.

        Raises:
            ApiError: 401 for a key that isn't known, 429 when its limits don't allow it now.
        """
        self._refresh()
        digest, found = _digest(given), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise errors.unauthorized()
        use = self._uses.setdefault(found.name, KeyUse(self._clock))
        try:
            use.enter(found)
        except ApiError:
            self.refused[found.name] = self.refused.get(found.name, 0) + 1
            raise
        return found.name, use

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now < self._due:
            return
        self._due = now + CHECK_SECONDS
        try:
            identity = _identity(self._path)
            if identity == self._seen:
                return
            self._seen = identity
            self._keys = (*self._fixed, *read_keys(self._path))
        except (OSError, ValueError) as error:
            log.error("the API keys stay as they were: %s", error)
            return
        log.info("%d API keys read from %s", len(self._keys), self._path)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file: a line each, NAME:KEY[:REQUESTS_PER_MINUTE[:CONCURRENCY]].

    An empty number is no limit; empty lines and those that begin with # are skipped. ValueError
    names file and line, never the key; OSError if the file can't be read.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
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
    name, secret, *limits = line.split(":")
    if not _NAME.fullmatch(name) or name == DEFAULT_NAME:
        raise ValueError(f"a name is 1 .. 64 of A-Z a-z 0-9 . _ - and not {DEFAULT_NAME!r}")
    if not _KEY.fullmatch(secret):
        raise ValueError(f"the key of {name!r} must be 1 .. 512 visible ASCII characters, no colon")
    if len(limits) > 2 or not all(limit == "" or limit.isdecimal() for limit in limits):
        raise ValueError(f"limits of {name!r} are whole numbers: requests a minute, concurrency")
    per_minute, concurrency = (int(limit or 0) for limit in (*limits, "", "")[:2])
    return ApiKey(name, _digest(secret.encode()), per_minute, concurrency)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _identity(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file is rewritten or replaced."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
