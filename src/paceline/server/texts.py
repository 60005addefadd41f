"""Texts of a call: what completions go on with and embeddings read, as words or as token ids."""

from __future__ import annotations

from typing import Any

from paceline.server.errors import ApiError
from paceline.server.refusals import shown


def split_texts(given: str | list[Any], *, param: str, most: int) -> list[str | list[int]]:
    """Return the texts of a call: of a string, token ids, or a list of either.

    Raises ApiError for none, for more than `most`, and for an item that is none.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, f"{param} is empty: send text or token ids", param=param)
    if _is_id(given[0]):
        for i, item in enumerate(given):
            if not _is_id(item):
                raise _odd(param, i, item, f"a token id, as {param}[0] is")
        return [given]
    if len(given) > most:
        raise ApiError(400, f"{param} holds {len(given)} texts: send at most {most}", param=param)
    for i, item in enumerate(given):
        if item == []:
            raise ApiError(400, f"{param}[{i}] is empty: send text or token ids", param=param)
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(_is_id, item))):
            raise _odd(param, i, item, "a string or a list of token ids")
    return given


def _odd(param: str, idx: int, item: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{param}[{idx}] is {shown(item)}: it must be {wanted}", param=param)


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
