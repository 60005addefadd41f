"""`paceline run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from paceline.cli.options import (
    ChatTemplateFile,
    Model,
    engine_options,
    sampling_options,
    with_terminal_defaults,
)
from paceline.config import EngineConfig
from paceline.errors import ParameterError


@engine_options
@sampling_options
def run(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(help="The prompt; `-` reads it from stdin.", show_default=False)
    ],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before the prompt.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when done, instead of the text.")
    ] = False,
    chat_template: ChatTemplateFile = None,
    config: EngineConfig,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt, and say where the time went.

    The answer streams to stdout; one line of timings follows on stderr.

    **Examples**

    - `paceline run smollm2-135m "Why is the sky blue?"`

    - `paceline run smollm2-135m "Once upon a time" --raw -n 50 --temperature 0`

    - `git diff | paceline run qwen2.5-coder-0.5b - --system "Review this change."`

    - `paceline run ./model.gguf "Hi" --json | jq .timings`
    """
    from paceline.cli.answer import answer, measure, timing_line
    from paceline.cli.loading import load
    from paceline.types import SamplingParams

    text = read_prompt(prompt)
    if raw and system is not None:
        raise ParameterError("--system needs the chat template: leave out --raw")
    SamplingParams(**sampling)  # a bad option is told before the model is loaded
    loaded = load(model, config, chat_template_file=chat_template)
    if raw or loaded.template is None:
        if system is not None:
            raise ParameterError(f"{loaded.name} has no chat template: --system has no place")
        token_ids = loaded.encode_prompt(text)
    else:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        token_ids = loaded.encode_chat(messages)
    params = SamplingParams(**with_terminal_defaults(sampling, loaded.default_params))
    choice = answer(loaded, token_ids, params, is_shown=not as_json)
    loaded.engine.stop()  # the measurement's buffer takes the place of the weights
    timings = measure(loaded, choice)
    if as_json:
        result = {
            "model": loaded.name,
            "isa": loaded.isa,
            "num_threads": loaded.config.num_threads,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "usage": asdict(choice.usage),
            "timings": timings,
        }
        print(json.dumps(result, ensure_ascii=False))
        return
    print(flush=True)
    print(timing_line(choice, timings), file=sys.stderr)


def read_prompt(prompt: str) -> str:
    """Return the prompt, from stdin for `-`. Raises ParameterError where it is no UTF-8."""
    if prompt == "-":
        data = sys.stdin.buffer.read()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ParameterError(f"stdin is no UTF-8 text: {error}") from None
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ParameterError("the prompt is no UTF-8 text") from None
    return prompt
