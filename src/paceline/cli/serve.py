"""`paceline serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct, structs

from paceline.cli.options import (
    ChatTemplateFile,
    Models,
    Pooling,
    Weights,
    engine_options,
    finite,
)
from paceline.config import EngineConfig
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.cli.serve_models import Wanted
    from paceline.server.admission import Limits
    from paceline.server.door import Keys, Life
    from paceline.server.tls import Tls

# With CPython's 5 ms the event loop waits that long for the GIL while the engine thread is busy.
_SWITCH_INTERVAL_S = 0.0005
_LOOPBACK = ("127.0.0.1", "::1")


@engine_options
def serve(
    models: Models,
    *,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            metavar="NAME=MODEL",
            help="Another name for a model, as clients may ask for it; may be given several times.",
            show_default=False,
        ),
    ] = None,
    model_memory: Annotated[
        str | None,
        typer.Option(
            "--model-memory",
            help="What several models may take together, weights and KV caches, as 8G. Where one "
            "does not fit, one that is idle is unloaded. Default: what is free at the start.",
            show_default=False,
        ),
    ] = None,
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
    pooling: Pooling = None,
    weights: Weights = "file",
    tls_cert: Annotated[
        str | None,
        typer.Option(
            "--tls-cert",
            help="Certificate file (PEM), with its chain: serves https. Needs --tls-key.",
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option("--tls-key", help="Key file (PEM) of --tls-cert.", show_default=False),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            help="Site whose pages may call this server from a browser, as https://example.org; "
            "may be given several times, * is every site. Default: none may.",
            show_default=False,
        ),
    ] = None,
    chat_template: ChatTemplateFile = None,
    config: EngineConfig,
) -> None:
    """Serve models over the OpenAI API: /v1/chat/completions, /v1/responses, /v1/embeddings.

    Anthropic's clients find /v1/messages: set their ANTHROPIC_BASE_URL to http://localhost:8000.

    A browser finds a page at /: a chat, and where its time goes. /health says what the engine
    is doing, /metrics tells Prometheus, and /v1/requests/ID/timeline where the time of an
    answer went.

    Of several models the `model` of a request says which answers. The first that writes is loaded
    at the start, another when it is first asked for, and they compute in turns. The engine's
    options hold for each of them. One that embeds texts alone answers /v1/embeddings.

    Ctrl-C or SIGTERM stops it: /ready says no, new calls get a 503, and calls in flight have
    --grace seconds to end. A second one ends them at once.

    **Examples**

    - `paceline serve smollm2-135m`

    - `paceline serve all-minilm-l6-v2`  (/v1/embeddings alone)

    - `paceline serve qwen2.5-coder-0.5b smollm2-135m --alias gpt-4o-mini=smollm2-135m`

    - `paceline serve smollm2-135m all-minilm-l6-v2 --model-memory 2G`

    - `paceline serve ./model.gguf --host 0.0.0.0 --port 9000 --max-num-seqs 8 --kv-memory 1G`

    - `curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
      '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}]}'`
    """
    from paceline.cli.loading import find_model
    from paceline.cli.serve_models import Wanted, read_aliases
    from paceline.embedding.build import is_encoder
    from paceline.server.admission import Limits
    from paceline.server.cors import check_origins
    from paceline.server.door import Life, read_keys
    from paceline.server.tls import check_tls

    if "PACELINE_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.INFO)
    limits = Limits(max_requests=max_queue, max_tokens=max_queue_tokens, timeout_s=queue_timeout)
    front = _Front(
        keys=None if api_keys is None else read_keys(api_keys),
        cors_origins=check_origins(cors_origin or ()),
        tls=check_tls(tls_cert, tls_key),
        listener=listen(host, port),  # a taken port is told before the model is loaded
        life=Life(),
        grace_s=grace,
    )
    config = structs.replace(config, ledger=ledger)
    named = read_aliases(models, alias or ())
    model, path = models[0], find_model(models[0])
    try:
        if len(models) == 1 and is_encoder(path):
            _refuse({
                "--alias": alias, "--model-memory": model_memory,
                "--max-queue": max_queue, "--queue-timeout": queue_timeout, "--otel": otel or None,
                "--access-log": access_log, "--chat-template": chat_template,
            })  # fmt: skip
            _serve_encoder(model, path, config, front, limits, pooling=pooling, weights=weights)
        else:
            wanted = Wanted(
                models=named, config=config, limits=limits, pooling=pooling, weights=weights,
                num_tenants=1 if front.keys is None else front.keys.num_tenants,
                chat_template=chat_template, memory=model_memory,
            )  # fmt: skip
            _serve_decoders(wanted, front, page=page, access_log=access_log, otel=otel)
    finally:
        gc.unfreeze()  # or the native objects in the server's cycles outlive their module


class _Front(Struct, frozen=True, kw_only=True):
    """How clients reach the server, whatever it serves."""

    keys: Keys | None
    cors_origins: tuple[str, ...]
    tls: Tls | None
    listener: socket.socket
    life: Life
    grace_s: float

    def run(self, app: FastAPI, name: str, stop: Callable[[], None], *, page: bool) -> None:
        """Say where `app` is, and serve it until a signal; `stop` ends what its calls wait for."""
        from paceline.server.serving import serve as serve_app

        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        log = logging.getLogger(__name__)
        log.info("serving %s on %s://%s:%d/v1", name, scheme, host, port)
        if self.keys is None and host not in _LOOPBACK:
            log.warning(
                "%s can be reached from other machines and answers everybody: give --api-keys FILE",
                host,
            )
        if page:
            log.info("its page: %s://%s:%d/", scheme, host, port)
        serve_app(app, self.listener, life=self.life, grace_s=self.grace_s, stop=stop, tls=self.tls)


def _serve_decoders(
    wanted: Wanted, front: _Front, *, page: bool, access_log: str | None, otel: bool
) -> None:
    from paceline.cli.serve_models import open_models
    from paceline.server.access_log import AccessLog
    from paceline.server.app import create_models_app
    from paceline.server.spans import Spans, otlp_provider

    log = None if access_log is None else AccessLog(access_log)
    provider = otlp_provider() if otel else None
    models = open_models(wanted)
    page = page and not models.first.is_encoder  # nobody to chat with
    spans = None if provider is None else Spans(provider, model=models.first.name)
    observers = [observer for observer in (log, spans) if observer is not None]
    app = create_models_app(
        models, observers=observers, life=front.life, keys=front.keys, page=page,
        cors_origins=front.cors_origins,
    )  # fmt: skip
    names = ", ".join(entry.name for entry in models.entries)
    front.run(app, names, models.stop, page=page)


def _serve_encoder(
    model: str,
    path: Path,
    config: EngineConfig,
    front: _Front,
    limits: Limits,
    *,
    pooling: str | None,
    weights: str,
) -> None:
    from paceline.embedding.build import load_embedding_model
    from paceline.server.embedding_app import create_embedding_app
    from paceline.server.embeddings import Embeddings

    loaded = load_embedding_model(model, config, path=path, pooling=pooling, weights=weights)
    embeddings = Embeddings(loaded, max_waiting=limits.max_tokens)
    app = create_embedding_app(
        embeddings, life=front.life, keys=front.keys, cors_origins=front.cors_origins
    )
    front.run(app, loaded.name, embeddings.close, page=False)


def _refuse(options: dict[str, object]) -> None:
    """Raise ParameterError naming an option that a model which embeds has no use for."""
    for name, value in options.items():
        if value is not None:
            raise ParameterError(f"{name} has no use for a model that embeds texts: leave it out")


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
