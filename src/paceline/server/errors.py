"""HTTP errors, in the shape of the API that was asked."""

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
_MAX_MESSAGE = 2000  # characters: what a client sent may be in it, and long
_MAX_PARAM = 200
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
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
    param = None if error.param is None else error.param[:_MAX_PARAM]
    message = str(error)[:_MAX_MESSAGE]
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def anthropic_error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return the body of Anthropic's error answers, which name a field in the message alone."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = str(error)[:_MAX_MESSAGE]
    if error.param is not None and error.param not in message:
        message = f"{error.param[:_MAX_PARAM]}: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_response(
    error: ApiError, headers: dict[str, str] | None = None, *, path: str = ""
) -> Response:
    """Return `error` as an answer to a call of `path`, whose API says how errors look."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(math.ceil(error.retry_after_s), 1))
    body = error_body(error)
    if path.startswith(_ANTHROPIC_PATH):
        name = headers.get("x-request-id")
        body = anthropic_error_body(error, name)
        if name is not None:
            headers["request-id"] = name
    return Response(
        msgspec.json.encode(body),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )
