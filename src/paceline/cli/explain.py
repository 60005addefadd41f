"""`paceline explain`: what bounds a server's latency, and what would help."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from paceline.cli.options import ApiKey
from paceline.cpu import resolve_num_threads
from paceline.errors import ParameterError

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_HOST_AND_PORT = re.compile(r"(\[[^/\]]*\]|[^/:]+):\d+(/|$)")
_LAST_S, _CONCURRENCY, _ROUNDS = 300.0, 8, 2
_FILE_SUFFIXES = frozenset({".json", ".jsonl", ".log", ".csv", ".txt", ".gz"})

if TYPE_CHECKING:
    from paceline.explain.costs import Machine
    from paceline.explain.facts import Facts
    from paceline.explain.replay import Planned
    from paceline.explain.report import Explanation
    from paceline.explain.situation import Situation
    from paceline.explain.verify import Verification
    from paceline.weights.checkpoint import Checkpoint


def explain(
    source: Annotated[
        str,
        typer.Argument(
            help="The address of a server; a file of `paceline trace`, of `serve --access-log`, or "
            "of `bench --server-timings` with `--log` or `--json`; or a workload: JSON lines with "
            "messages or a prompt, or a trace of lengths."
        ),
    ] = "http://127.0.0.1:8000",
    *,
    last: Annotated[
        float | None,
        typer.Option(
            "--last",
            min=0.001,
            help="Seconds to look back, on a server. Default: 300.",
            show_default=False,
        ),
    ] = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            show_default=False,
            help="The server's model, to reckon floors on this machine, to run a workload, and for "
            "--verify. Of a server of several models: which of them, default its first.",
        ),
    ] = None,
    serve: Annotated[
        str, typer.Option("--serve", help="Options of `paceline serve` to run a workload with.")
    ] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            help="Requests of a workload at once, where it has no times. Default: 8.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Run the same load with and without the first advice, and compare."
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="Rounds of --verify, with and without in turns. Default: 2.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what bounds TTFT and TPOT, how far from the floor they are, and what would help.

    Each percentile is taken apart by the ledgers of the calls near it: computing its own tokens,
    waiting for a seat or for KV memory, prompts and tokens of others in its steps, Python, slow
    clients. Options that would change the largest of them are listed with what the measured cost
    of steps predicts, the best first.

    **Examples**

    - `paceline explain`: the server on this machine, its last five minutes

    - `paceline explain localhost:8000 --model smollm2-135m`: of several models, this one

    - `paceline explain trace.json --model smollm2-135m --verify`

    - `paceline explain work.jsonl --model smollm2-135m --serve "--max-num-seqs 2"`

    - `paceline explain localhost:8000 --json | jq '.explanation.advice[0]'`
    """  # fmt: skip
    from paceline.cli.explain_text import print_explanation, print_verification, status
    from paceline.explain.report import explain as explain_situation

    if rounds is not None and not verify:
        raise ParameterError("--rounds is for --verify: give both")
    with status() as say:
        situation, planned = find(
            source, last_s=last, api_key=api_key, model=model, serve=serve, concurrency=concurrency,
            say=say,
        )  # fmt: skip
        explanation = explain_situation(situation)
        checked = None
        if verify:
            checked = check(
                situation, explanation, planned, model=model,
                concurrency=concurrency or _CONCURRENCY, rounds=rounds or _ROUNDS, say=say,
            )  # fmt: skip
    if as_json:
        body = msgspec.json.encode({"explanation": explanation, "verification": checked})
        print(msgspec.json.format(body, indent=2).decode())
        return
    print_explanation(explanation)
    if checked is not None:
        print_verification(checked)
    elif verify:
        is_known = explanation.server is not None
        print(f"Nothing to verify: no option is {'advised' if is_known else 'evaluated'}.")


def find(
    source: str,
    *,
    last_s: float | None,
    api_key: str | None,
    model: str | None,
    serve: str,
    concurrency: int | None,
    say: Callable[[str], None],
) -> tuple[Situation, list[Planned] | None]:
    """Return the situation that `source` tells of, and the plan of a workload that was run."""
    from paceline.cli.bench_values import read_headers
    from paceline.cli.loading import find_model
    from paceline.explain import sources
    from paceline.explain.costs import this_machine_with
    from paceline.explain.situation import situation_of
    from paceline.remote import base_address
    from paceline.weights.checkpoint import open_checkpoint

    path = Path(source)
    if not path.is_file() and looks_like_file(source):
        what = "does not exist"
        if path.exists():
            what = "is a folder" if path.is_dir() else "is no regular file and cannot be read twice"
        raise ParameterError(
            f"the file {source} {what}: name a file, or an address such as http://127.0.0.1:8000"
        )
    for option, value in {"--api-key": api_key, "--last": last_s}.items():
        if path.is_file() and value is not None:
            raise ParameterError(f"{option} is for a server: {source} is a file")
    planned = None
    facts = sources.from_file(path) if path.is_file() else None
    if facts is None and path.is_file():
        facts, planned = run_workload(path, model, serve, concurrency or _CONCURRENCY, say)
    elif serve:
        raise ParameterError("--serve is for a workload: a recorded server had its own options")
    elif concurrency is not None:
        raise ParameterError("--concurrency is for a workload: what ran came as it came")
    if facts is None:
        headers, base = read_headers(api_key, []), base_address(source)
        name = "" if model is None else sources.served_name(base, model, headers)
        facts = sources.from_server(base, last_s or _LAST_S, headers, model=name)
        if name and model is not None and not is_here(model):
            model = None  # it is chosen by its name alone: floors are not known
    machine: Machine | None = None
    checkpoint = installed_model(facts) if model is None else open_checkpoint(find_model(model))
    if checkpoint is not None:
        say("the machine's ceilings")
        machine = this_machine_with(checkpoint, facts.server)
    return situation_of(facts, machine), planned


def is_here(model: str) -> bool:
    """Whether a model, called as a server calls it, lies on this disk."""
    from paceline.catalog import find as find_entry
    from paceline.catalog.store import is_installed

    entry = find_entry(model)
    return Path(model).exists() if entry is None else is_installed(entry)


def looks_like_file(source: str) -> bool:
    """Whether a source that is no file can only have been meant as one.

    An address has a scheme or a port, or is a mere host name; "/v1" may follow.
    """
    if "://" in source or _HOST_AND_PORT.match(source):
        return False
    name = source.rstrip("/").removesuffix("/v1")
    return "/" in name or os.sep in name or Path(name).suffix.lower() in _FILE_SUFFIXES


def installed_model(facts: Facts) -> Checkpoint | None:
    """Return the model of a server on this machine, if it is in the catalogue's folder.

    None where the machine's ceilings are not known yet: they are measured only where the user
    names the model, for the server may be busy.
    """
    from paceline.catalog import find as find_entry
    from paceline.catalog.store import is_installed, model_path
    from paceline.explain.costs import weight_bytes
    from paceline.measure.ceilings import known_ceilings
    from paceline.weights.checkpoint import open_checkpoint

    server = facts.server
    if server is None or urlsplit(facts.source).hostname not in _THIS_MACHINE:
        return None
    entry, known = find_entry(server.model), known_ceilings()
    if entry is None or not is_installed(entry) or known is None:
        return None
    if known.at(server.num_threads) is None:
        return None
    checkpoint = open_checkpoint(model_path(entry))
    # A file of another origin can have the name of a catalogue model.
    return checkpoint if weight_bytes(checkpoint) == server.weight_bytes else None


def run_workload(
    path: Path, model: str | None, serve: str, concurrency: int, say: Callable[[str], None]
) -> tuple[Facts, list[Planned]]:
    """Serve `model` with these options, send it the workload at `path`, return what happened."""
    from paceline.cli.loading import find_model
    from paceline.explain.replay import plan_of_file, run

    planned = plan_of_file(path)
    if model is None:
        raise ParameterError(f"{path} is a workload: name the model to run it on with --model")
    options = read_options(serve)
    say(f"{len(planned)} requests of {path}")
    return run(find_model(model), options, planned, concurrency=concurrency), planned


def read_options(serve: str) -> dict[str, str]:
    """Return the options of "--max-num-seqs 2 --no-prefix-cache", with --threads among them.

    An option without a value, such as the second one, has an empty one.
    """
    options: dict[str, str] = {"--threads": str(resolve_num_threads(None)[0])}
    name = ""
    try:
        words = shlex.split(serve)
    except ValueError as error:
        raise ParameterError(
            f"--serve is {serve!r}, which is no command line ({error}): close what is quoted, as "
            "in --serve \"--policy 'fcfs'\""
        ) from None
    for word in words:
        if word.startswith("--"):
            name, options[word] = word, ""
        elif name and not options[name]:
            options[name] = word
        else:
            raise ParameterError(f"--serve is {serve!r}: {word!r} is the value of no option")
    if not options["--threads"].isdigit():
        raise ParameterError(f"--serve is {serve!r}: --threads needs a number")
    return options


def check(
    situation: Situation,
    explanation: Explanation,
    planned: list[Planned] | None,
    *,
    model: str | None,
    concurrency: int,
    rounds: int,
    say: Callable[[str], None],
) -> Verification | None:
    """Verify the first advice that an option can follow; None where there is none."""
    from paceline.cli.loading import find_model
    from paceline.explain.levers import LEVERS, options_of
    from paceline.explain.replay import plan_of_run
    from paceline.explain.verify import verify

    if model is None:
        raise ParameterError("--verify runs servers on this machine: name the model with --model")
    first = next((advice for advice in explanation.advice if advice.change), None)
    if first is None or situation.server is None:
        return None
    proposal = LEVERS[first.lever](situation)
    assert proposal is not None
    return verify(
        first.lever,
        proposal,
        planned or plan_of_run(situation.facts),
        model=find_model(model),
        options=options_of(situation.server),
        machine=situation.machine,
        concurrency=concurrency,
        rounds=rounds,
        on_run=say,
    )
