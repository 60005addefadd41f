"""Served, ServedEncoder: a loaded model, and all that answers for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.server.answers import STOP_TIMEOUT_S, Answers
from paceline.server.messages.routes import MessageRoutes
from paceline.server.prefixes import PrefixRoutes
from paceline.server.tokens import TokenRoutes

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel
    from paceline.server.admission import Limits
    from paceline.server.embeddings import Embeddings


class Served:
    """Limits, turns between keys and pins are each model's own. Started on the event loop."""

    def __init__(
        self,
        loaded: LoadedModel,
        embeddings: Embeddings | None,
        *,
        limits: Limits,
        num_tenants: int,
    ) -> None:
        self.loaded = loaded
        self.answers = Answers(loaded, limits, num_tenants=num_tenants)
        self.messages = MessageRoutes(loaded, self.answers)
        self.prefixes = PrefixRoutes(loaded, self.answers, num_tenants=num_tenants)
        self.tokens = TokenRoutes(loaded)
        self.embeddings = embeddings

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits in its engine, nor to be embedded."""
        stats = self.loaded.engine.stats()
        num_texts = 0 if self.embeddings is None else self.embeddings.num_waiting_tokens
        return not (stats.num_running or stats.num_waiting or num_texts)

    def start(self) -> None:
        self.answers.start()
        self.loaded.engine.start()

    def stop(self) -> None:
        """End what calls wait for, free the memory of weights and KV cache. Idempotent.

        It may wait for a step: not for the event loop's thread.
        """
        self.loaded.engine.stop(STOP_TIMEOUT_S)
        if self.embeddings is not None:
            self.embeddings.close()

    def close(self) -> None:
        """Stop, and end the threads that read and compiled for it."""
        self.stop()
        self.answers.close()


class ServedEncoder:
    """An encoder, which embeds texts and has no engine."""

    loaded = None

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings

    @property
    def is_idle(self) -> bool:
        return not self.embeddings.num_waiting_tokens

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.embeddings.close()

    def close(self) -> None:
        """Stop, and free the memory also where no text has come."""
        self.stop()
        self.embeddings.model.open().close()
