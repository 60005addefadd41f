"""Door: who comes in. Keys, and no new calls while the server is being stopped."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.errors import ParameterError
from paceline.server.body import request_id
from paceline.server.errors import ApiError, error_response

# Without a key: what probes and load balancers ask, and the page, which is files alone.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
_TENANT = "paceline_tenant"  # in a call's state: whose key it came with
_OPEN_FOLDER = "/page/"
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MIN_KEY_CHARS = 16


class Life(Struct):
    """What a server is up to. Written by the event loop's thread alone."""

    is_draining: bool = False
    num_calls: int = 0  # calls inside, from their first byte to the last of the reply


class Keys:
    """API keys, kept as SHA-256 sums. A key is long and random, so no slow hash is needed."""

    def __init__(self, sums: list[bytes]) -> None:
        self._sums = sums
        self.num_tenants = len(set(sums))

    def tenant(self, key: str) -> str | None:
        """Return a name for who has `key`, None if it is none of ours.

        The time that it takes does not tell which key it is. The name is the same after a restart,
        and no key can be told from it.
        """
        given = hashlib.sha256(key.encode("utf-8", errors="replace")).digest()
        found = False
        for known in self._sums:
            found |= hmac.compare_digest(known, given)
        return hashlib.sha256(b"tenant" + given).hexdigest() if found else None


def read_keys(path: str) -> Keys:
    """Return the keys of a file: one a line, plain or as `sha256:HEX`; # begins a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the key file {path} cannot be read: {error}") from None
    sums = []
    for number, line in enumerate(lines, 1):
        key = line.split("#", 1)[0].strip()
        if not key:
            continue
        hashed = _HASHED.fullmatch(key)
        is_plain = len(key) >= _MIN_KEY_CHARS and key.isascii() and key.isprintable()
        if hashed is None and (key.startswith("sha256:") or not is_plain):
            raise ParameterError(
                f"line {number} of {path} is no key: write at least {_MIN_KEY_CHARS} characters of "
                "ASCII, or sha256: and 64 hexadecimal digits"
            )
        plain = hashlib.sha256(key.encode()).digest()
        sums.append(plain if hashed is None else bytes.fromhex(hashed[1]))
    if not sums:
        raise ParameterError(f"the key file {path} holds no key: nobody could ask anything")
    return Keys(sums)


def tenant(scope: Scope) -> str:
    """Return the name of whose key a call came with; "" where no keys are asked for."""
    name: str = scope.get("state", {}).get(_TENANT, "")
    return name


def cache_salt(scope: Scope, asked: str | None) -> str:
    """Return the salt of a call's prefixes: what it asked for, apart for each key.

    A name of a tenant has always the same length, so no salt of one is a salt of another.
    """
    return tenant(scope) + (asked or "")


class Door:
    """ASGI middleware in front of the routes. `counted` are the paths of calls to be finished."""

    def __init__(
        self, app: ASGIApp, *, life: Life, keys: Keys | None, counted: frozenset[str]
    ) -> None:
        self._app = app
        self._life = life
        self._keys = keys
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_call = scope["method"] == "POST" and scope["path"] in self._counted
        refusal = self._refusal(scope, is_call=is_call)
        if refusal is not None:
            headers = {"x-request-id": request_id(HttpRequest(scope))}
            if refusal.status == 401:
                headers["www-authenticate"] = "Bearer"
            await error_response(refusal, headers, path=scope["path"])(scope, receive, send)
            return
        self._life.num_calls += is_call
        try:
            await self._app(scope, receive, send)
        finally:
            self._life.num_calls -= is_call

    def _refusal(self, scope: Scope, *, is_call: bool) -> ApiError | None:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._keys is not None and not is_open:
            name = self._keys.tenant(_key(HttpRequest(scope)))
            if name is None:
                return ApiError(
                    401, "the API key is missing or unknown: send Authorization: Bearer KEY, or "
                    "x-api-key: KEY",
                    code="invalid_api_key",
                )  # fmt: skip
            scope.setdefault("state", {})[_TENANT] = name
        if is_call and self._life.is_draining:
            return ApiError(
                503, "the server is shutting down: try again later", code="shutting_down",
                retry_after_s=1,
            )  # fmt: skip
        return None


def _key(http: HttpRequest) -> str:
    """Return the key that a call came with, as OpenAI's clients send it or as Anthropic's do."""
    kind, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else http.headers.get("x-api-key", "")
