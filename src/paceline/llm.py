"""LLM: batches of prompts in this process, through the same engine that serves."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from paceline.completion import Choice, ChoiceBuilder, Completion
from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.errors import BackendError, ParameterError
from paceline.types import Delta, Request, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from paceline.engine.build import LoadedModel
    from paceline.engine.engine import Engine
    from paceline.structured.grammar import Grammar

__all__ = ["LLM", "Choice", "Completion", "new_request", "stream"]

Prompt = str | list[int]
Message = Mapping[str, Any]


class LLM:
    """A model for offline use: `LLM("smollm2-135m").generate("Hello")[0].text`.

    Keyword arguments are those of EngineConfig, and `chat_template` (a Jinja source). Prompts of
    one call run as one batch. Use it as a context manager, or `close()` it, to free its memory.
    Threads may share it: their calls run one after the other.
    """

    def __init__(
        self, model: str | PathLike[str], *, chat_template: str | None = None, **options: Any
    ) -> None:
        known = EngineConfig.__struct_fields__
        for name in options:
            if name not in known:
                raise ParameterError(
                    f"LLM has no option {name!r}: choose from {', '.join(sorted(known))}",
                    param=name,
                )
        if not isinstance(model, str | PathLike):
            raise ParameterError(f"model is {model!r}: it must be a name or a path", param="model")
        self._lock = threading.Lock()
        self._loaded: LoadedModel | None = load_model(
            fspath(model), EngineConfig(**options), chat_template=chat_template
        )

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise ParameterError("this LLM is closed: make a new one")
        return self._loaded

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Return a completion per prompt, in order. `params`: one for all, or one each.

        None takes what the model's own files recommend. A bad prompt fails the call before any
        of it runs. Ctrl-C aborts what runs and leaves the LLM usable.
        """
        texts = _as_list(prompts)
        ids = [self.loaded.encode_prompt(p) if isinstance(p, str) else _ids(p) for p in texts]
        shown = [p if isinstance(p, str) else None for p in texts]
        return self._run(shown, ids, params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Return a completion per conversation, through the model's chat template."""
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        ids = [self.loaded.encode_chat(conversation) for conversation in conversations]
        return self._run([None] * len(ids), ids, params, progress=progress)

    def _run(
        self,
        shown: Sequence[str | None],
        ids: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[Completion]:
        each = self._params_each(params, len(ids))
        builders = [
            [ChoiceBuilder(idx, p.logprobs is not None) for idx in range(p.n)] for p in each
        ]
        num_choices = sum(p.n for p in each)
        with self._lock, _progress_bar(num_choices, is_shown=progress) as advance:
            requests = [
                new_request(i, p, self.loaded.grammar(p)) for i, p in zip(ids, each, strict=True)
            ]
            rows = {request.id: row for row, request in enumerate(requests)}
            for delta in stream(self.loaded.engine, requests):
                builders[rows[delta.request_id]][delta.index].add(delta)
                advance(len(delta.token_ids), delta.finish_reason is not None)
        return [
            Completion(
                prompt=shown[row],
                prompt_token_ids=request.prompt_token_ids,
                outputs=tuple(builder.choice() for builder in builders[row]),
            )
            for row, request in enumerate(requests)
        ]

    def _params_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.loaded.default_params)
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, list | tuple):
            raise ParameterError(
                f"params is {params!r}: give SamplingParams, or a list of them", param="params"
            )
        if len(params) != num_prompts:
            raise ParameterError(
                f"{len(params)} params for {num_prompts} prompts: give one for all, or one each",
                param="params",
            )
        return list(params)

    def close(self) -> None:
        """Free the engine, its KV cache and its threads. The LLM is then of no more use."""
        with self._lock:
            if self._loaded is not None:
                self._loaded.engine.stop(timeout_s=5.0)
                self._loaded = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def _ids(prompt: Sequence[int]) -> list[int]:
    """Return the token ids of a prompt, those of NumPy as Python's own."""
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError:
        raise ParameterError(
            f"the prompt {str(prompt)[:80]} is neither text nor a list of token ids", param="prompt"
        ) from None


def new_request(
    token_ids: Sequence[int], params: SamplingParams, grammar: Grammar | None = None
) -> Request:
    """Return a request that arrives now; `grammar` is `params.structured`, compiled."""
    return Request(
        id=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        params=params,
        arrival_ns=time.monotonic_ns(),
        grammar=grammar,
    )


def stream(engine: Engine, requests: Sequence[Request]) -> Generator[Delta, None, None]:
    """Run `requests` in this thread and yield their deltas as they are made.

    All are checked before any is queued. Leaving early (an exception, Ctrl-C, closing the
    iterator) aborts what still runs and steps the engine until it is idle.
    """
    for request in requests:
        engine.check(request)
    deltas: deque[Delta] = deque()
    num_open = {request.id: request.params.n for request in requests}
    try:
        for request in requests:
            engine.submit(request, deltas.append)
        while num_open:
            engine.step()
            while deltas:
                delta = deltas.popleft()
                if delta.finish_reason is not None:
                    num_open[delta.request_id] -= 1
                    if num_open[delta.request_id] == 0:
                        del num_open[delta.request_id]
                if delta.finish_reason == "error":
                    if delta.error_param is not None:
                        raise ParameterError(delta.error or "", param=delta.error_param)
                    raise BackendError(delta.error or "the engine failed on this request")
                yield delta
    finally:
        if num_open:
            for request_id in num_open:
                engine.abort(request_id)
            engine.step()


@contextmanager
def _progress_bar(num_choices: int, *, is_shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """Yield `advance(num_tokens, is_finished)`; it draws only on a terminal."""
    if not is_shown:
        yield lambda num_tokens, is_finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=num_choices, rate=0.0)
        start = time.monotonic()
        num_tokens = 0

        def advance(more: int, is_finished: bool) -> None:
            nonlocal num_tokens
            num_tokens += more
            elapsed = max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=int(is_finished), rate=num_tokens / elapsed)

        yield advance
