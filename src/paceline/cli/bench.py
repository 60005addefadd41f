"""`paceline bench`: load any OpenAI-compatible servers, and say what they deliver."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.bench_offline import offline
from paceline.cli.bench_spec import spec
from paceline.cli.bench_values import (
    check_command_alone,
    check_names,
    check_not_empty,
    check_outputs,
    check_server_options,
    read_endpoint,
    read_fields,
    read_headers,
    read_limits,
    read_loads,
    read_price,
    read_share,
    server_settings,
)
from paceline.errors import PacelineError, ParameterError

if TYPE_CHECKING:
    from paceline.bench.program import Program

TARGETS = "Servers"
WORK = "Workload"
LOAD = "Load"
REPORT = "Report"

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode="markdown")
app.command("offline")(offline)
app.command("spec")(spec)


def _option(panel: str, *flags: str, **settings: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, show_default=False, **settings)


@app.callback()
def bench(
    ctx: typer.Context,
    *,
    target: Annotated[
        list[str] | None,
        _option(TARGETS, "--target", help="URL or name=URL; several are compared in rounds."),
    ] = None,
    serve: Annotated[
        str | None,
        _option(TARGETS, "--serve", help="Start `paceline serve` on this model, and measure it."),
    ] = None,
    serve_arguments: Annotated[
        str | None,
        _option(TARGETS, "--serve-with", help="More options of `paceline serve`, in quotes."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        _option(
            TARGETS,
            "--peer",
            help="Start llama.cpp, openvino or transformers on the same "
            "model and threads, and compare. Needs --serve or --peer-model.",
        ),
    ] = None,
    peer_model: Annotated[
        str | None, _option(TARGETS, "--peer-model", help="Model of the peers, without --serve.")
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        _option(TARGETS, "--peer-python", help="NAME=PATH: the Python that has that peer."),
    ] = None,
    threads: Annotated[
        int | None,
        _option(TARGETS, "--threads", min=1, help="Threads of the servers that are started."),
    ] = None,
    slots: Annotated[
        int | None, _option(TARGETS, "--slots", min=1, help="Streams at once in a peer (8).")
    ] = None,
    context: Annotated[
        int | None,
        _option(TARGETS, "--context", min=256, help="Tokens of a stream in a peer (8192)."),
    ] = None,
    model: Annotated[
        str | None,
        _option(TARGETS, "--model", help="Model to ask for. Default: the first that is listed."),
    ] = None,
    endpoint: Annotated[
        str, _option(TARGETS, "--endpoint", help="chat (default) or completions.")
    ] = "chat",
    api_key: Annotated[
        str | None, _option(TARGETS, "--api-key", help="Bearer token; @FILE reads it from a file.")
    ] = None,
    header: Annotated[
        list[str] | None, _option(TARGETS, "--header", help="A header, as 'Name: value'.")
    ] = None,
    body: Annotated[
        str | None,
        _option(
            TARGETS,
            "--body",
            help='JSON fields for every request, over our own ({"temperature": 0}); null leaves '
            "one out.",
        ),
    ] = None,
    server_timings: Annotated[
        bool,
        _option(
            TARGETS,
            "--server-timings",
            help="Ask a Paceline server for the ledger of each request (X-Paceline-Timings).",
        ),
    ] = False,
    workload: Annotated[
        str,
        _option(
            WORK,
            "--workload",
            help="synthetic (default), chat, text, conversations, "
            "shared-prefix, rag, code, batch, tools, mixed or trace, with options as "
            "name:key=value,…: see docs/bench.md.",
        ),
    ] = "synthetic",
    tokenizer: Annotated[
        str | None,
        _option(
            WORK,
            "--tokenizer",
            help="Model whose tokenizer counts tokens: prompts get "
            "their exact length, and answers without usage are counted.",
        ),
    ] = None,
    seed: Annotated[
        int, _option(WORK, "--seed", help="Same seed, same requests at the same times.")
    ] = 0,
    ignore_eos: Annotated[
        bool | None,
        _option(
            WORK,
            "--ignore-eos/--no-ignore-eos",
            help="Ask for answers of full length. Default: where the workload sets their length.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        _option(
            LOAD,
            "--concurrency",
            min=1,
            max=10_000,
            help="Closed loop: so many users at once (1 is the default load).",
        ),
    ] = None,
    rate: Annotated[
        str | None, _option(LOAD, "--rate", help="Open loop: requests a second.")
    ] = None,
    arrival: Annotated[
        str | None,
        _option(
            LOAD,
            "--arrival",
            help="poisson (default), gamma:shape=K (below 1: bursty), "
            "constant, ramp:to=R,over=60s, replay:file=F,speed=1 or burst (all at once).",
        ),
    ] = None,
    sweep: Annotated[
        str | None, _option(LOAD, "--sweep", help="Several rates in turn, as 0.5,1,2,4.")
    ] = None,
    find_rate: Annotated[
        bool,
        _option(LOAD, "--find-rate", help="Search the highest rate that holds the objectives."),
    ] = False,
    requests: Annotated[
        int | None, _option(LOAD, "--requests", min=1, help="End after so many requests.")
    ] = None,
    duration: Annotated[
        str | None,
        _option(
            LOAD,
            "--duration",
            help="End after so long. Default: 30s, or the trace's end, without --requests.",
        ),
    ] = None,
    warmup: Annotated[
        str,
        _option(
            LOAD,
            "--warmup",
            help="A duration (5s) or a number of requests (10) that come "
            "before and count for nothing.",
        ),
    ] = "0",
    drain: Annotated[
        str,
        _option(
            LOAD,
            "--drain",
            help="Wait so long after the end for answers that are still "
            "coming. Default: 0s; 60s with --find-rate.",
        ),
    ] = "0s",
    timeout: Annotated[
        str, _option(LOAD, "--timeout", help="A request that takes longer is given up (600s).")
    ] = "600s",
    rounds: Annotated[
        int | None,
        _option(
            LOAD,
            "--rounds",
            min=1,
            help="Times that each target gets each load, "
            "interleaved. Default: 1 for one target, 3 for several.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        _option(
            REPORT,
            "--slo",
            help="Objective, as ttft=300ms,tpot=50ms,itl=200ms,e2e=5s; with "
            "CLASS: before it for one class of requests. May be given several times.",
        ),
    ] = None,
    at_least: Annotated[
        str | None,
        _option(REPORT, "--at-least", help="Share within the objective for --find-rate (95%)."),
    ] = None,
    price: Annotated[
        float | None, _option(REPORT, "--price", min=0, help="Cost of the machine an hour.")
    ] = None,
    watts: Annotated[
        float | None, _option(REPORT, "--watts", min=0, help="Power of the machine.")
    ] = None,
    as_json: Annotated[
        bool, _option(REPORT, "--json", help="Print one JSON object instead of tables.")
    ] = False,
    log: Annotated[
        Path | None, _option(REPORT, "--log", help="Write a JSON line a request, and a summary.")
    ] = None,
    html: Annotated[
        Path | None, _option(REPORT, "--html", help="Write a report with plots, one file.")
    ] = None,
) -> None:
    """Load OpenAI-compatible servers and report latency, throughput and goodput.

    Latency counts from the moment a request was due. Failed requests stay in the denominator.
    Ctrl-C ends the run and reports what was measured.

    **Examples**

    - `paceline bench --target localhost:8000 --concurrency 8 --requests 200`

    - `paceline bench --target localhost:8000 --workload chat --rate 2 --duration 60s --warmup 10s
      --slo ttft=500ms,tpot=50ms --html report.html`

    - `paceline bench --target localhost:8000 --find-rate --slo ttft=500ms --at-least 95%`

    - `paceline bench --target a=localhost:8000 --target b=localhost:9000 --sweep 1,2 --rounds 5`

    - `paceline bench offline smollm2-135m --batch 1,8,32`

    - `paceline bench spec qwen2.5-coder-1.5b`
    """
    if ctx.invoked_subcommand is not None:
        check_command_alone(ctx)
        return
    from paceline.bench.engine_terminal import show_status
    from paceline.bench.objective import check_classes, parse_objectives
    from paceline.bench.program import Program
    from paceline.bench.prose import token_counter
    from paceline.bench.servers import running
    from paceline.bench.stage import Plan
    from paceline.bench.target import parse_target
    from paceline.bench.workloads import build_workload

    check_outputs(log, html)
    check_not_empty(
        {"--serve": serve, "--peer-model": peer_model, "--model": model, "--tokenizer": tokenizer,
         "--arrival": arrival}
    )  # fmt: skip
    check_server_options(
        serve, peer,
        {"--serve-with": serve_arguments, "--peer-model": peer_model, "--slots": slots,
         "--peer-python": peer_python, "--context": context, "--threads": threads},
    )  # fmt: skip
    urls = [parse_target(text) for text in target or ()]
    started = ["paceline"] if serve is not None else []
    started += peer or []
    check_names([name for name, _ in urls] + started, peer or ())
    count_tokens = None if tokenizer is None else token_counter(tokenizer)
    built = build_workload(workload, count_tokens=count_tokens)
    plan = Plan(
        workload=built,
        objectives=parse_objectives(slo or ()),
        limits=read_limits(
            requests, duration, warmup, drain, timeout, arrival=arrival, is_search=find_rate
        ),
        seed=str(seed),
        count_tokens=count_tokens,
        price=read_price(price, watts),
    )
    check_classes(plan.objectives, built.kinds)
    if find_rate and not plan.objectives:
        raise ParameterError("--find-rate needs an objective: give --slo ttft=500ms,tpot=50ms")
    if find_rate and rounds is not None:
        raise ParameterError("--rounds has no effect with --find-rate: it tries each rate once")
    program = Program(
        urls=urls,
        plan=plan,
        num_rounds=rounds or (3 if len(urls) + len(started) > 1 else 1),
        model=model,
        endpoint=read_endpoint(endpoint),
        headers=read_headers(api_key, header or (), server_timings=server_timings),
        fields=read_fields(body),
        ignores_eos=built.fixes_length if ignore_eos is None else ignore_eos,
        at_least=read_share(at_least, find_rate=find_rate),
        config={
            "workload": workload, "seed": seed, "concurrency": concurrency, "rate": rate,
            "arrival": arrival, "sweep": sweep, "find_rate": find_rate, "at_least": at_least,
            "requests": requests, "duration": duration, "warmup": warmup, "drain": drain,
            "timeout": timeout, "rounds": rounds, "slo": slo, "tokenizer": tokenizer,
            "endpoint": endpoint, "body": body, "ignore_eos": ignore_eos,
            "server_timings": server_timings, "price": price, "watts": watts, "model": model,
            "header_names": [text.partition(":")[0].strip() for text in header or ()],
            "serve": serve, "serve_with": serve_arguments, "peers": peer,
            "peer_model": peer_model, "threads": threads, "slots": slots, "context": context,
        },
        **read_loads(concurrency, rate, arrival, sweep, find_rate=find_rate),
    )  # fmt: skip
    with ExitStack() as stack:
        if started:
            settings = server_settings(
                serve or peer_model, serve_arguments, peer_python or (), threads, slots, context
            )
            with show_status() as say:
                servers = running(started, settings, on_start=lambda name: say(f"starting {name}"))
                urls += stack.enter_context(servers)
        _run_and_report(program, as_json=as_json, log=log, html=html)


def _run_and_report(
    program: Program, *, as_json: bool, log: Path | None, html: Path | None
) -> None:
    import json

    from paceline.bench.program import run_program
    from paceline.bench.terminal import LiveLine, print_report, report_console

    with LiveLine() as line:
        result = run_program(program, log=log, on_progress=line.update)
    failures = [] if result.log_error is None else [result.log_error]
    if html is not None:
        from paceline.bench.html import write_html

        try:
            write_html(html, result)
        except ParameterError as error:  # the run took long: its figures are shown all the same
            failures.append(str(error))
    document = result.document
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        print_report(document, report_console())
    counts = [stage["requests"] for stage in document["stages"]]
    if not any(count["ok"] for count in counts):
        num_cut = sum(count["cut"] for count in counts)
        why = f": {num_cut} still open at its end" if num_cut else ""
        if document["interrupted"]:
            failures.append(f"interrupted before one complete answer{why}")
        else:
            remedy = " (--drain 60s waits for them)" if num_cut else ""
            failures.append(f"the run ended without one complete answer{why}{remedy}")
    if failures:
        raise PacelineError("; ".join(failures))
