"""ResponseStore: the latest responses, for those who ask for them again or go on from them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


class _Named(msgspec.Struct):
    id: str


class _State(msgspec.Struct):
    status: str


class Stored(msgspec.Struct, frozen=True):
    """A response and the items that were sent before it, both as JSON: objects take more room."""

    body: bytes
    sent: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.sent)

    def conversation(self) -> list[dict[str, Any]]:
        """Return all items up to the end of the answer."""
        return [*self.items(), *msgspec.json.decode(self.body)["output"]]

    @property
    def status(self) -> str:
        return msgspec.json.decode(self.body, type=_State).status

    def items(self) -> list[dict[str, Any]]:
        """Return the items before the answer."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.sent)
        return items

    def listed(self) -> list[tuple[str, msgspec.Raw]]:
        """Return the items before the answer as JSON, each with its id: there may be megabytes."""
        items = msgspec.json.decode(self.sent, type=list[msgspec.Raw])
        return [(msgspec.json.decode(item, type=_Named).id, item) for item in items]


class ResponseStore:
    """Keeps responses in memory, apart for each tenant.

    Of all of them at most `max_responses` in `max_bytes`: beyond that the tenant that holds most
    loses its oldest, so nobody pushes out another's by asking much. Used by several threads.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, OrderedDict[str, Stored]] = {}
        self._tenant_bytes: dict[str, int] = {}
        self._num_kept = 0

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """Keep a response, in the place of an earlier state of it."""
        with self._lock:
            if response_id in self._kept.get(tenant, {}):
                self._drop(tenant, response_id)
            self._kept.setdefault(tenant, OrderedDict())[response_id] = stored
            self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + stored.num_bytes
            self._num_kept += 1
            while (
                self._num_kept > self._max_responses
                or sum(self._tenant_bytes.values()) > self._max_bytes
            ):
                heaviest = max(self._tenant_bytes, key=self._tenant_bytes.__getitem__)
                self._drop(heaviest, next(iter(self._kept[heaviest])))

    def get(self, tenant: str, response_id: str) -> Stored | None:
        with self._lock:
            own = self._kept.get(tenant)
            return None if own is None else own.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; those that went on from it stay whole. Return whether it was there."""
        with self._lock:
            is_here = response_id in self._kept.get(tenant, {})
            if is_here:
                self._drop(tenant, response_id)
            return is_here

    def _drop(self, tenant: str, response_id: str) -> None:
        own = self._kept[tenant]
        self._tenant_bytes[tenant] -= own.pop(response_id).num_bytes
        self._num_kept -= 1
        if not own:
            del self._kept[tenant], self._tenant_bytes[tenant]
