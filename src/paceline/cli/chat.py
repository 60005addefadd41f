"""`paceline chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from paceline.cli.options import (
    ChatTemplateFile,
    Model,
    engine_options,
    sampling_options,
    with_terminal_defaults,
)
from paceline.config import EngineConfig

_HELP = """\
/help   this list
/reset  begin a new conversation
/exit   leave (also Ctrl-D, or Ctrl-C at the prompt)
Ctrl-C stops an answer."""


@engine_options
@sampling_options
def chat(
    model: Model,
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message for the conversation.")
    ] = None,
    chat_template: ChatTemplateFile = None,
    config: EngineConfig,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model, turn by turn.

    `/help` lists what can be typed; Ctrl-C stops an answer, and leaves at the prompt.

    **Examples**

    - `paceline chat smollm2-135m`

    - `paceline chat qwen2.5-coder-0.5b --system "Answer in one sentence." --temperature 0`
    """
    from paceline.cli.loading import load
    from paceline.types import SamplingParams

    SamplingParams(**sampling)
    loaded = load(model, config, chat_template_file=chat_template)
    loaded.encode_chat([{"role": "user", "content": "Hi"}])  # no template: say so at once
    params = SamplingParams(**with_terminal_defaults(sampling, loaded.default_params))
    Conversation(loaded, params, system).run()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, loaded: Any, params: Any, system: str | None) -> None:
        self._loaded = loaded
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def run(self) -> None:
        """Read and answer until the user leaves."""
        _enable_line_editing()
        print(f"{self._loaded.name}. /help for help, /exit to leave.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if line == "/exit":
                return
            if line == "/help":
                print(_HELP, file=sys.stderr)
            elif line == "/reset":
                self.reset()
                print("A new conversation.", file=sys.stderr)
            elif line.startswith("/") and " " not in line:
                print(f"{line} is no command: /help lists them", file=sys.stderr)
            elif line:
                self.turn(line)

    def turn(self, line: str) -> None:
        """Answer `line`. A turn that cannot be answered leaves the conversation as it was."""
        from paceline.cli.answer import answer, timing_line
        from paceline.errors import ParameterError, PromptTooLongError

        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            choice = answer(self._loaded, self._loaded.encode_chat(messages), self._params)
        except PromptTooLongError as error:
            print(f"{error}. /reset begins a new conversation.", file=sys.stderr)
            return
        except ParameterError as error:
            print(error, file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(stopped; this turn is forgotten)", file=sys.stderr)
            return
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": choice.text}]
        num_tokens = choice.usage.prompt_tokens + choice.usage.completion_tokens
        max_model_len = self._loaded.config.max_model_len
        if choice.finish_reason == "length" and num_tokens >= max_model_len:
            print(
                f"(cut: the context of {max_model_len} tokens is full; /reset begins a new "
                "conversation)",
                file=sys.stderr,
            )
        if sys.stderr.isatty():
            timings = {
                "load_s": self._loaded.load_s,
                "queue_s": choice.timings.queue_s,
                "ttft_s": choice.timings.ttft_s,
                "tpot_s": choice.timings.tpot_s,
                "tokens_per_s": choice.timings.tpot_s and 1 / choice.timings.tpot_s,
                "bandwidth_fraction": None,
            }
            print(timing_line(choice, timings), file=sys.stderr)


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (input() edits lines once it is imported)
    except ImportError:
        return
