"""What the options of `paceline bench` say, checked and in the bench's own words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.errors import ParameterError

if TYPE_CHECKING:
    import typer

    from paceline.bench.arrivals import Arrivals, Closed
    from paceline.bench.course import Limits
    from paceline.bench.servers import Settings
    from paceline.bench.summary import Price
    from paceline.bench.target import Endpoint

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DEFAULT_SHARE = 0.95
_LAST_LATIN_1 = 0xFF
_MAX_WARMUP = 1_000_000
_MAX_PRICE = 1e12  # an hour, or watts
_FRAMING = ("host", "connection", "content-length", "transfer-encoding", "content-type",
            "accept-encoding")  # fmt: skip
_CHOSEN = ("--host", "--port", "--tls-cert", "--tls-key")  # of a server that the bench starts


def check_command_alone(ctx: typer.Context) -> None:
    """Refuse options of `paceline bench` before one of its commands, which has its own."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise ParameterError(
                f"{parameter.opts[0]} has no effect on `bench {ctx.invoked_subcommand}`: write its "
                "options after it"
            )


def check_names(names: Sequence[str], peers: Sequence[str]) -> None:
    """Refuse no server, two of one name, and peers that nobody knows."""
    from paceline.bench.servers import PEERS

    for peer in peers:
        if peer not in PEERS:
            raise ParameterError(f"--peer is {peer!r}: choose one of {', '.join(PEERS)}")
    if not names:
        raise ParameterError(
            "no server is named: give --target http://localhost:8000, or --serve MODEL"
        )
    if len(set(names)) < len(names):
        raise ParameterError("two targets have one name: write --target NAME=URL")


def check_not_empty(given: Mapping[str, str | None]) -> None:
    """Refuse options that are there and say nothing."""
    for name, value in given.items():
        if value == "":
            raise ParameterError(f"{name} is empty: name one, or leave it out")


def check_outputs(log: Path | None, html: Path | None) -> None:
    """Refuse files that cannot be written, before the run that they are for."""
    check_output("--log", log)
    check_output("--html", html)
    if log is not None and html is not None and log.resolve() == html.resolve():
        raise ParameterError(f"--log and --html are both {log}: name two files")


def check_output(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work that it is for."""
    if path is None:
        return
    if path == Path():  # an empty text
        raise ParameterError(f"{name} is empty: name a file to write")
    if path.is_dir():
        raise ParameterError(f"{name} {path} is a folder: name a file to write")
    if not path.absolute().parent.is_dir():
        raise ParameterError(f"{name} {path} cannot be written: its folder does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ParameterError(f"{name} {path} cannot be written: permission denied")


def check_server_options(
    serve: str | None, peers: Sequence[str] | None, given: Mapping[str, object]
) -> None:
    """Refuse options of servers that are not started: they would do nothing."""
    needs_peer = ("--slots", "--context", "--peer-python", "--peer-model")
    for name, value in given.items():
        if value is None or value == []:
            continue
        if name == "--serve-with" and serve is None:
            raise ParameterError(f"{name} has no effect without --serve MODEL")
        if name in needs_peer and not peers:
            raise ParameterError(f"{name} has no effect without --peer")
        if name == "--peer-model" and serve is not None:
            raise ParameterError(f"{name} has no effect with --serve: peers take its model")
        if serve is None and not peers:
            raise ParameterError(f"{name} has no effect without --serve or --peer")


def read_endpoint(text: str) -> Endpoint:
    if text not in ("chat", "completions"):
        raise ParameterError(f"--endpoint is {text!r}: choose chat or completions")
    return "chat" if text == "chat" else "completions"


def server_settings(
    model: str | None,
    serve_arguments: str | None,
    pythons: Sequence[str],
    threads: int | None,
    slots: int | None,
    context: int | None,
) -> Settings:
    """Return what the servers that the bench starts share; their model is fetched if need be."""
    from paceline.bench.servers import Settings, parse_pythons
    from paceline.cli.loading import find_model
    from paceline.cpu import resolve_num_threads

    if model is None:
        raise ParameterError("--peer needs a model: give --serve MODEL or --peer-model MODEL")
    try:
        arguments = shlex.split(serve_arguments or "")
    except ValueError as error:
        raise ParameterError(
            f"--serve-with is {serve_arguments!r}, which is no command line: {error}"
        ) from None
    for argument in arguments:
        if (name := argument.partition("=")[0]) in _CHOSEN:
            raise ParameterError(
                f"--serve-with has {name}, which the bench chooses: leave it out, or start the "
                "server yourself and give --target URL"
            )
    return Settings(
        model=find_model(model).resolve(),
        num_threads=resolve_num_threads(threads)[0],
        slots=slots or 8,
        context=context or 8192,
        serve_arguments=arguments,
        pythons=parse_pythons(pythons),
    )


def read_loads(
    concurrency: int | None,
    rate: str | None,
    arrival: str | None,
    sweep: str | None,
    *,
    find_rate: bool,
) -> dict[str, Any]:
    """Return the part of a Program that says how requests come."""
    from paceline.bench.arrivals import Closed, build_arrivals, parse_rate

    given = None if rate is None else parse_rate(rate, "--rate")
    is_open = given is not None or sweep is not None or find_rate or arrival is not None
    arrival = arrival or "poisson"
    has_own_rate = arrival.split(":")[0] in ("burst", "replay")
    if has_own_rate and (given is not None or sweep is not None or find_rate):
        raise ParameterError(
            f"--arrival {arrival} has its own times: leave out --rate, --sweep and --find-rate"
        )
    if concurrency is not None and is_open:
        raise ParameterError(
            "--concurrency is a closed loop: leave out --rate, --sweep, --find-rate and --arrival"
        )
    if not is_open:
        return {"loads": [({}, Closed(concurrency or 1))]}
    if arrival.split(":")[0] == "ramp" and (sweep is not None or find_rate):
        raise ParameterError(
            f"--arrival {arrival} changes its own rate: leave out --sweep and --find-rate"
        )
    if find_rate:
        if sweep is not None:
            raise ParameterError("--find-rate chooses its own rates: leave out --sweep")
        return {"search_from": given or 1.0, "arrivals_at": partial(build_arrivals, arrival)}
    loads: list[tuple[dict[str, Any], Arrivals | Closed]] = []
    if sweep is not None:
        if given is not None:
            raise ParameterError("--sweep has its own rates: leave out --rate")
        for text in sweep.split(","):
            value = parse_rate(text, "--sweep")
            if any(labels["rate"] == value for labels, _ in loads):
                raise ParameterError(f"--sweep names {value:g} twice: repeat it with --rounds")
            loads.append(({"rate": value}, build_arrivals(arrival, value)))
        return {"loads": loads}
    labels = {} if given is None else {"rate": given}
    return {"loads": [(labels, build_arrivals(arrival, given))]}


def read_limits(
    requests: int | None,
    duration: str | None,
    warmup: str,
    drain: str,
    timeout: str,
    *,
    arrival: str | None,
    is_search: bool,
) -> Limits:
    from paceline.bench.course import Limits
    from paceline.bench.units import parse_duration, parse_integer, parse_span

    if is_search and requests is not None:
        raise ParameterError("--find-rate takes the length of a stage from --duration")
    arrival = arrival or ""
    if arrival.startswith("burst") and requests is None and not is_search:
        raise ParameterError("--arrival burst needs --requests: how many come at once")
    if duration is None and requests is None and not arrival.startswith("replay"):
        duration = "30s"
    is_count = warmup.isdecimal()
    num_warmup = parse_integer(warmup, "--warmup", 0, _MAX_WARMUP) if is_count else 0
    return Limits(
        num_requests=requests,
        duration_s=None if duration is None else parse_span(duration, "--duration"),
        warmup_s=0.0 if is_count else parse_duration(warmup, "--warmup"),
        warmup_requests=num_warmup,
        drain_s=parse_duration(drain, "--drain"),
        timeout_s=parse_span(timeout, "--timeout"),
    )


def read_headers(
    api_key: str | None, headers: Sequence[str], *, server_timings: bool = False
) -> dict[str, str]:
    found = {"X-Paceline-Timings": "true"} if server_timings else {}
    for text in headers:
        name, colon, value = text.partition(":")
        if not colon or _HEADER_NAME.fullmatch(name.strip()) is None:
            raise ParameterError(f"--header is {text!r}: write 'Name: value'")
        if name.strip().lower() in _FRAMING:
            raise ParameterError(f"--header {name.strip()} is set by the bench: leave it out")
        found[name.strip()] = _header_value(value.strip(), f"--header {name.strip()}")
    if api_key is not None:
        if api_key.startswith("@"):
            try:
                api_key = Path(api_key[1:]).read_text(encoding="utf-8").strip()
            except UnicodeDecodeError:
                raise ParameterError(f"--api-key {api_key}: the file is no UTF-8 text") from None
            except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
                reason = getattr(error, "strerror", None) or error
                raise ParameterError(f"--api-key {api_key}: {reason}") from None
        if not api_key:
            raise ParameterError("--api-key is empty: leave it out, or name a key")
        found["Authorization"] = f"Bearer {_header_value(api_key, '--api-key')}"
    return found


def _header_value(value: str, what: str) -> str:
    """Return a value that HTTP can carry. Raises ParameterError, without the value: it may be
    secret."""
    for char in value:
        if not char.isprintable() and char != "\t":
            raise ParameterError(f"{what} holds the control character {char!r}: leave it out")
        if ord(char) > _LAST_LATIN_1:
            raise ParameterError(f"{what} holds {char!r}: a header has Latin-1 characters alone")
    return value


def read_price(per_hour: float | None, watts: float | None) -> Price:
    from paceline.bench.summary import Price

    for name, value in (("--price", per_hour), ("--watts", watts)):
        if value is not None and not 0 <= value <= _MAX_PRICE:
            raise ParameterError(f"{name} is {value}: it must be from 0 to {_MAX_PRICE:g}")
    return Price(per_hour=per_hour, watts=watts)


def read_fields(body: str | None) -> dict[str, Any]:
    """Return what goes into every request: greedy, unless the user says otherwise. None leaves a
    field out."""
    fields: dict[str, Any] = {"temperature": 0}
    if body is not None:
        try:
            given = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ParameterError(
                f"--body is {body[:80]!r}, which is no JSON ({error}): write such as "
                "'{\"temperature\": 1}'"
            ) from None
        if not isinstance(given, dict):
            raise ParameterError("--body must be a JSON object, such as '{\"temperature\": 1}'")
        fields.update(given)
    return fields


def read_share(text: str | None, *, find_rate: bool) -> float:
    from paceline.bench.units import parse_positive

    if text is None:
        return _DEFAULT_SHARE
    if not find_rate:
        raise ParameterError("--at-least has no effect without --find-rate")
    value = parse_positive(text.removesuffix("%"), "--at-least")
    value = value / 100 if text.endswith("%") else value
    if value > 1:
        raise ParameterError(f"--at-least is {text}: write a share such as 95% or 0.95")
    return value
