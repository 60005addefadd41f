"""transformers on torch behind the OpenAI API: the weights of the GGUF file, dequantised.

It has no scheduler for a server's streams, so they are answered one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch  # noqa: TID251
import transformers  # noqa: TID251

from paceline.bench.adapters.shell import Piece, main


class Transformers:
    """One stream at a time, greedy, with a dynamic KV cache."""

    num_slots = 1

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        path = Path(options.model)
        self.name = path.stem
        self.context: int = options.context
        # Without instructions for bf16, float32 is the faster of the two.
        has_bf16 = " avx512_bf16 " in Path("/proc/cpuinfo").read_text(encoding="ascii")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16 if has_bf16 else torch.float32
        ).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name
        )
        self._stream = 0
        self._next: torch.Tensor | None = None
        self._cache: Any = None
        self._ids: list[int] = []
        self._text = ""
        self._max_tokens = 0
        self._ignore_eos = False

    def encode(self, messages: list[dict[str, Any]] | None, prompt: str | None) -> list[int]:
        if messages is None:
            return list(self._tokenizer.encode(prompt or ""))
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def submit(self, stream: int, ids: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self._stream, self._max_tokens, self._ignore_eos = stream, max_tokens, ignore_eos
        self._next, self._cache, self._ids, self._text = torch.tensor([ids]), None, [], ""

    def step(self) -> Iterable[Piece]:
        with torch.inference_mode():
            out = self._model(
                input_ids=self._next, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        token = int(self._next)
        if not self._ignore_eos and token == self._tokenizer.eos_token_id:
            return [Piece(self._stream, "", 0, "stop")]
        self._ids.append(token)
        is_over = len(self._ids) >= self._max_tokens
        text = self._tokenizer.decode(self._ids)
        fresh = ""
        if is_over or not text.endswith("\ufffd"):  # half a character waits for its rest
            fresh, self._text = text[len(self._text) :], text
        return [Piece(self._stream, fresh, 1, "length" if is_over else None)]

    def drop(self, stream: int) -> None:
        self._next, self._cache = None, None


if __name__ == "__main__":
    main(Transformers)
