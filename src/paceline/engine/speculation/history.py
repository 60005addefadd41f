"""History: earlier answers, each tenant's apart, to copy guesses from."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

from paceline.engine.speculation.index import MIN_MATCH, NgramIndex

_MAX_TOKENS = 2**15  # of a tenant; with its index half a megabyte
_MAX_TENANTS = 16  # those that wrote longest ago are forgotten
_SEPARATOR = -1  # between answers: no token


class History:
    """The latest answers of the latest tenants, at most 8 MiB in all.

    A tenant is a salt: what one has been told is never a guess for another, whose time of an
    answer would else tell of it.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Answers] = OrderedDict()

    def add(self, tenant: str, tokens: Seq[int]) -> None:
        """Keep an answer. One too short to match anything is not kept."""
        if len(tokens) <= MIN_MATCH:
            return
        answers = self._tenants.pop(tenant, None) or _Answers()
        self._tenants[tenant] = answers
        answers.add(tokens)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)

    def look_up(self, tenant: str, tokens: Seq[int], limit: int) -> tuple[int, list[int]]:
        """Return the longest match of the end of `tokens`, and what followed it: up to `limit`."""
        answers = self._tenants.get(tenant)
        return (0, []) if answers is None else answers.look_up(tokens, limit)


class _Answers:
    """Those of one tenant, one after the other."""

    def __init__(self) -> None:
        self._tokens = array("i", [_SEPARATOR])
        self._index = NgramIndex(_MAX_TOKENS)

    def add(self, tokens: Seq[int]) -> None:
        self._tokens.extend(tokens[-(_MAX_TOKENS // 2) :])
        self._tokens.append(_SEPARATOR)
        if len(self._tokens) > _MAX_TOKENS:
            self._tokens = self._tokens[-(_MAX_TOKENS // 2) :]
            self._index = NgramIndex(_MAX_TOKENS)
        self._index.extend(self._tokens)

    def look_up(self, tokens: Seq[int], limit: int) -> tuple[int, list[int]]:
        num_matched, place = self._index.find(tokens, self._tokens)
        follow = self._tokens[place + 1 : place + 1 + limit].tolist() if num_matched else []
        if _SEPARATOR in follow:
            del follow[follow.index(_SEPARATOR) :]
        return (num_matched, follow) if follow else (0, [])
