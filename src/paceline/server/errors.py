"""HTTP errors in the OpenAI shape."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from paceline.errors import PacelineError, ParameterError

_TYPES = {
    401: "authentication_error", 429: "rate_limit_error", 500: "server_error",
    503: "server_error", 504: "server_error",
}  # fmt: skip


class ApiError(PacelineError):
    """An answer other than 200: `param` names the field at fault, `code` is OpenAI's code.

    `retry_after_s` tells the client when it is worth its while to ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def as_api_error(error: PacelineError) -> ApiError:
    """Return `error` as the 400 it is to a client."""
    if isinstance(error, ApiError):
        return error
    param = error.param if isinstance(error, ParameterError) else None
    return ApiError(400, str(error), param=param)


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of OpenAI's error answers."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    detail = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": detail}


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    if error.retry_after_s is not None:
        headers = {**(headers or {}), "retry-after": str(max(math.ceil(error.retry_after_s), 1))}
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )
