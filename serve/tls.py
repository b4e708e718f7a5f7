"""HTTPS: the certificate is read before anything is started."""

import ssl
from typing import TypedDict

from octavo.serve.config import ServerConfig


class TlsOptions(TypedDict, total=False):
    """uvicorn's settings for HTTPS."""

    ssl_certfile: str
    ssl_keyfile: str


def tls_options(config: ServerConfig) -> TlsOptions:
    """The settings, none for plain HTTP; ValueError for unusable files."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ValueError("tls_cert and tls_key must be given together")
    if not config.tls_cert:
        return {}
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        files = f"tls_cert {config.tls_cert}, tls_key {config.tls_key}"
        raise ValueError(f"{files}: {error}") from None
    return {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}


def _no_password() -> str:
    """Instead of the prompt on the terminal that an encrypted key would bring."""
    raise ValueError("the key is encrypted; give it without a password")
