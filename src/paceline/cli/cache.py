"""`paceline cache`: what a running server is to have computed before it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from paceline.cli.options import ApiKey
from paceline.errors import PacelineError, ParameterError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help=(
        "Compute the beginnings of prompts ahead, and pin them in a server's prefix cache.\n\n"
        "The first question after a start pays for the system prompt; with `cache warm` it does "
        "not. A pinned beginning is not given up for other prompts, as long as these fit beside it."
    ),
)
_PATH = "/v1/cache/prefixes"
_TIMEOUT_S = 3600.0  # a long beginning on a busy server
_MISSING = "only a Paceline server has it"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Prefix(msgspec.Struct):
    """What a server tells of a beginning."""

    id: str
    prompt_tokens: int
    pinned_tokens: int
    cached_tokens: int


class _Pins(msgspec.Struct):
    data: list[_Prefix]


Told = TypeVar("Told", _Models, _Prefix, _Pins)
Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
IsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]


@app.command()
def warm(
    text: Annotated[
        str | None, typer.Argument(help="The system prompt; @FILE reads it from a file.")
    ] = None,
    *,
    url: Url = "http://127.0.0.1:8000",
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            help="JSON file: a list of messages, or an object with messages and tools.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The text begins prompts of /v1/completions.")
    ] = False,
    pin: Annotated[
        bool, typer.Option("--pin", help="Keep it until `paceline cache unpin`, or the end.")
    ] = False,
    cache_salt: Annotated[
        str | None, typer.Option("--cache-salt", help="The salt that the calls to come send.")
    ] = None,
    as_json: IsJson = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Which of the server's models. Default: the first.", show_default=False
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Compute how prompts begin, so that the first that does so finds it.

    **Examples**

    - `paceline cache warm 'You are a helpful assistant.'`

    - `paceline cache warm @system.txt --pin --url http://10.0.0.5:8000 --api-key @keyfile`

    - `paceline cache warm --messages conversation.json`
    """
    from paceline.cli.stages import show_stages
    from paceline.remote import base_address, fetch_models, send

    body: dict[str, Any] = {"pin": pin, **_beginning(text, messages, is_raw=raw)}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    base, headers = base_address(url), _headers(api_key)
    if model is None:
        model = _decoded(fetch_models(base, headers), _Models, base).data[0].id
    with show_stages() as stages:
        stages.show("the server computes", 0, 1)
        body = {"model": model, **body}
        told = send(base + _PATH, headers, body=body, timeout_s=_TIMEOUT_S, missing=_MISSING)
    answer = _decoded(told, _Prefix, base)
    if as_json:
        print(told.decode())
        return
    print(f"{answer.prompt_tokens} tokens, {answer.cached_tokens} of them known before")
    if pin:
        print(f"pinned {answer.pinned_tokens} tokens as {answer.id}")


@app.command("list")
def list_pins(
    *, url: Url = "http://127.0.0.1:8000", as_json: IsJson = False, api_key: ApiKey = None
) -> None:
    """List what is pinned, by this API key where the server has several."""
    from paceline.remote import base_address, send

    base = base_address(url)
    told = send(base + _PATH, _headers(api_key), missing=_MISSING)
    pins = _decoded(told, _Pins, base).data
    if as_json:
        print(told.decode())
        return
    for pin in pins:
        print(f"{pin.id}  {pin.pinned_tokens} of {pin.prompt_tokens} tokens")


@app.command()
def unpin(
    name: Annotated[str, typer.Argument(help="The pin's id, as `paceline cache list` shows it.")],
    *,
    url: Url = "http://127.0.0.1:8000",
    as_json: IsJson = False,
    api_key: ApiKey = None,
) -> None:
    """Let a pin go: it stays cached until its memory is needed."""
    from urllib.parse import quote

    from paceline.remote import base_address, send

    address = f"{base_address(url)}{_PATH}/{quote(name, safe='')}"
    told = send(address, _headers(api_key), method="DELETE")
    print(told.decode() if as_json else f"{name} is no longer pinned")


def _decoded(told: bytes, kind: type[Told], base: str) -> Told:
    try:
        return msgspec.json.decode(told, type=kind)
    except msgspec.DecodeError:
        raise PacelineError(
            f"{base} does not answer as a Paceline server does: is the address right?"
        ) from None


def _beginning(text: str | None, messages: Path | None, *, is_raw: bool) -> dict[str, Any]:
    """Return the fields of a call that say what is to be computed."""
    if (text is None) == (messages is None):
        raise ParameterError("give a text or --messages FILE, one of them")
    if messages is not None:
        if is_raw:
            raise ParameterError("--raw is of a text: leave out --messages")
        try:
            given = json.loads(_read(messages, "--messages"))
            json.dumps(given, ensure_ascii=False).encode()  # halves of characters are no text
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"--messages: {messages} holds no JSON: {error}") from None
        return given if isinstance(given, dict) else {"messages": given}
    assert text is not None
    if text.startswith("@"):
        text = _read(Path(text[1:]), "the text")
    return {"prompt": text} if is_raw else {"messages": [{"role": "system", "content": text}]}


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{what}: {path} cannot be read: {error}") from None


def _headers(api_key: str | None) -> Mapping[str, str]:
    from paceline.cli.bench_values import read_headers

    return read_headers(api_key, [])
