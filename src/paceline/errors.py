"""Error types. Every message says what was wrong, the value, and the remedy."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that a user can cause and mend."""


class ParameterError(PacelineError):
    """A request or option value that is out of range or unsupported; `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(ParameterError):
    """The prompt does not fit the context or the KV pool."""


class ModelNotFoundError(PacelineError):
    """No catalogue entry, file or folder has that name."""


class ModelFormatError(PacelineError):
    """A model file is broken, cut or hostile; the message names the file and the key or tensor."""


class UnsupportedModelError(PacelineError):
    """A well-formed model that needs something this build does not have."""


class TokenizerError(PacelineError):
    """The tokenizer cannot be built from the model's data."""


class TemplateError(ParameterError):
    """The chat template is absent, refused the messages, or broke its bounds."""


class OutputError(PacelineError):
    """A result cannot be written where it should go."""


class PullError(PacelineError):
    """A model could not be fetched, verified or stored."""


class BackendError(PacelineError):
    """The backend cannot run the plan or a step failed in it."""
