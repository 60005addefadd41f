"""TLS: the certificate and the key that a server shows."""

from __future__ import annotations

import ssl

from msgspec import Struct

from paceline.errors import ParameterError


class Tls(Struct, frozen=True):
    """Files in PEM: a certificate, with the chain to its issuer behind it, and its key."""

    cert: str
    key: str


def check_tls(cert: str | None, key: str | None) -> Tls | None:
    """Return the files, None where none are given. Raises ParameterError unless they fit."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, lacking = (
            ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        )
        raise ParameterError(f"{given} needs {lacking}: give both, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (cert, key):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ParameterError(f"the TLS file {path} cannot be read: {error.strerror}") from None
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ParameterError(
            f"{cert} and {key} are no certificate and its key ({error.reason or error}): give PEM "
            "files that belong together"
        ) from None
    return Tls(cert, key)


def _no_password() -> str:
    raise ParameterError(
        "the TLS key is encrypted, and a server has nobody to ask for its password: decrypt it "
        "with `openssl pkey -in KEY -out PLAIN`"
    )
