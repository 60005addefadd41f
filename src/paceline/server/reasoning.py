"""What a chat asks of a model's thinking, and whether this model can do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.server.errors import ApiError
from paceline.server.params import structured_field
from paceline.structured.reasoned import ReasonedGrammar
from paceline.text.reasoning import SWITCH, Opening, opening_of, reasons, think_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.engine.build import LoadedModel
    from paceline.server.schema import ChatRequest
    from paceline.structured.grammar import Grammar

_EFFORT = "reasoning_effort"


def template_variables(request: ChatRequest, template: str) -> dict[str, Any]:
    """Return what the chat template is told of thinking. Raises ApiError for what it cannot do."""
    told = variables_of(request.chat_template_kwargs, template)
    effort = request.reasoning_effort
    if effort is not None:
        told |= _with_effort(template, effort, told)
    if request.thinking_token_budget is not None and not reasons(template):
        raise _unable("thinking_token_budget", "thinking_token_budget is given", "does not reason")
    return told


def variables_of(kwargs: Mapping[str, Any] | None, template: str) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template is told them. Raises ApiError."""
    told: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        path = f"chat_template_kwargs.{name[:80]}"
        if name != SWITCH:
            raise ApiError(
                400, f"{path} is not a variable this server hands to chat templates: send {SWITCH}",
                param=path, code="unknown_parameter",
            )  # fmt: skip
        if not isinstance(value, bool):
            raise ApiError(400, f"{path} is {repr(value)[:80]}: it must be a boolean", param=path)
        told |= _switched(template, value, f"{path} is {str(value).lower()}", path)
    return told


def _with_effort(template: str, effort: str, told: dict[str, Any]) -> dict[str, Any]:
    shown = f"{_EFFORT} is {effort!r}"
    if effort == "none":
        if told.get(SWITCH):
            raise ApiError(
                400, f"{shown} and {SWITCH} is true: send one of them", param=_EFFORT
            )  # fmt: skip
        return _switched(template, False, shown, _EFFORT)
    if _EFFORT not in template:
        raise ApiError(
            400, f"{shown}, and this model knows no degrees of it: leave it out"
            + (", or send 'none'" if SWITCH in template or not reasons(template) else ""),
            param=_EFFORT, code="unsupported_parameter",
        )  # fmt: skip
    return {_EFFORT: effort}


def _switched(template: str, wanted: bool, shown: str, param: str) -> dict[str, Any]:
    """Return the variable that switches thinking, {} where the model does as wanted anyway."""
    if SWITCH in template:
        return {SWITCH: wanted}
    if wanted != reasons(template):
        raise _unable(param, shown, "does not reason" if wanted else "always reasons")
    return {}


def _unable(param: str, shown: str, problem: str) -> ApiError:
    return ApiError(
        400, f"{shown}, and this model {problem}: leave it out", param=param,
        code="unsupported_parameter",
    )  # fmt: skip


def opening(loaded: LoadedModel, prompt: Sequence[int]) -> Opening | None:
    """Return where the answer to a chat begins; None for a model that does not reason."""
    if loaded.template is None or not reasons(loaded.template.source):
        return None
    return opening_of(prompt, loaded.tokenizer)


def reasoned(
    loaded: LoadedModel, grammar: Grammar | None, begins: Opening | None, request: ChatRequest
) -> Grammar | None:
    """Return `grammar` for an answer that may be thought about first, within the budget.

    Where the markers are no tokens of their own a structure binds the answer from its first token,
    so the model cannot think; what cannot be done then is refused.
    """
    budget = request.thinking_token_budget
    if begins in (None, Opening.OVER) or (grammar is None and budget is None):
        return grammar
    assert begins is not None
    tokens = think_tokens(loaded.tokenizer)
    if tokens is None:
        if budget is None and begins is Opening.MAY_BEGIN:
            return grammar
        binding = "tools" if request.tools else structured_field(request)
        param = binding if budget is None else "thinking_token_budget"
        raise _unable(
            param, f"{param} is given", "spells the end of its thinking by several tokens"
        )
    return ReasonedGrammar(grammar, begins, tokens, eos_ids=loaded.grammars.eos_ids, budget=budget)
