"""`paceline serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from typing import Annotated

import typer
from msgspec import structs

from paceline.cli.options import ChatTemplateFile, Model, engine_options, finite
from paceline.config import EngineConfig
from paceline.errors import ParameterError

# With CPython's 5 ms the event loop waits that long for the GIL while the engine thread is busy.
_SWITCH_INTERVAL_S = 0.0005
_LOOPBACK = ("127.0.0.1", "::1")


@engine_options
def serve(
    model: Model,
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger/--no-ledger", help="Book where each call's time goes (costs less than 1 %)."
        ),
    ] = True,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            callback=finite,
            help="Seconds that calls in flight get to end at Ctrl-C or SIGTERM.",
        ),
    ] = 3.0,
    max_queue: Annotated[
        int | None,
        typer.Option(
            "--max-queue",
            min=1,
            show_default=False,
            help="Prompts that may wait for their first token; a call that would make them more "
            "gets a 429 that says when to come back. Where nothing waits, a call of any size is "
            "let in.",
        ),
    ] = None,
    max_queue_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-queue-tokens",
            min=1,
            show_default=False,
            help="The same bound, in tokens of prompts.",
        ),
    ] = None,
    queue_timeout: Annotated[
        float | None,
        typer.Option(
            "--queue-timeout",
            min=0.001,
            callback=finite,
            show_default=False,
            help="Seconds after which a call without a token gets a 503.",
        ),
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(
            "--api-keys",
            help="File of the keys that clients may send, one a line, plain or sha256:HEX. "
            "Each key has cached prefixes of its own. Default: everybody is answered.",
            show_default=False,
        ),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            "--access-log",
            help="File that gets a line of JSON for each call, with its ledger; `-` is stderr.",
        ),
    ] = None,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Send OpenTelemetry spans, over OTLP, to where the "
            "OTEL_EXPORTER_OTLP_* variables say.",
        ),
    ] = False,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page",
            help="Serve a page at / for the browser: a chat whose tokens show their latency, "
            "and live figures.",
        ),
    ] = True,
    chat_template: ChatTemplateFile = None,
    config: EngineConfig,
) -> None:
    """Serve a model over the OpenAI API: /v1/chat/completions, /v1/responses, /v1/completions.

    Anthropic's clients find /v1/messages: set their ANTHROPIC_BASE_URL to http://localhost:8000.

    A browser finds a page at /: a chat, and where its time goes. /health says what the engine
    is doing, /metrics tells Prometheus, and /v1/requests/ID/timeline where the time of an
    answer went.

    Ctrl-C or SIGTERM stops it: /ready says no, new calls get a 503, and calls in flight have
    --grace seconds to end. A second one ends them at once.

    **Examples**

    - `paceline serve smollm2-135m`

    - `paceline serve ./model.gguf --host 0.0.0.0 --port 9000 --max-num-seqs 8 --kv-memory 1G`

    - `curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
      '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}]}'`
    """
    from paceline.cli.loading import load
    from paceline.server.access_log import AccessLog
    from paceline.server.admission import Limits
    from paceline.server.door import read_keys
    from paceline.server.serving import serve as serve_app
    from paceline.server.spans import Spans, otlp_provider

    if "PACELINE_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.INFO)
    limits = Limits(max_requests=max_queue, max_tokens=max_queue_tokens, timeout_s=queue_timeout)
    keys = None if api_keys is None else read_keys(api_keys)
    listener = listen(host, port)  # a taken port is told before the model is loaded
    log = None if access_log is None else AccessLog(access_log)
    provider = otlp_provider() if otel else None
    config = structs.replace(config, ledger=ledger)
    loaded = load(model, config, chat_template_file=chat_template)
    spans = None if provider is None else Spans(provider, model=loaded.name)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    shown_host, shown_port = listener.getsockname()[:2]
    logging.getLogger(__name__).info(
        "serving %s on http://%s:%d/v1", loaded.name, shown_host, shown_port
    )
    if keys is None and shown_host not in _LOOPBACK:
        logging.getLogger(__name__).warning(
            "%s can be reached from other machines and answers everybody: give --api-keys FILE",
            shown_host,
        )
    if page:
        logging.getLogger(__name__).info("its page: http://%s:%d/", shown_host, shown_port)
    try:
        observers = [observer for observer in (log, spans) if observer is not None]
        serve_app(loaded, listener, grace_s=grace, observers=observers, keys=keys,
                  limits=limits, page=page)  # fmt: skip
    finally:
        gc.unfreeze()  # or the native objects in the server's cycles outlive their module


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host:port. Raises ParameterError saying why it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ParameterError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --host or --port"
        ) from None
