"""The texts that a session's blocks read: a prompt's, or a mixture on the way from one to another.

Holds weights, and the prompts that were encoded last; nothing of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.models.base import Encode
from worldkv.models.causal_wan.config import BRANCH
from worldkv.models.causal_wan.inputs import Blend, Prompt, State
from worldkv.models.wan.network import Network

_MAX_EMBEDDINGS = 64  # prompts whose text is not encoded again; 4 MB each at the true sizes


class Texts:
    """Of one model."""

    def __init__(self, spec: KVSpec, network: Network) -> None:
        self._spec, self._network = spec, network
        self._embeddings: dict[str, torch.Tensor] = {}  # of the prompts encoded last, by digest

    def set_own(self, kv: KVState, state: State) -> Generator[Encode, torch.Tensor, None]:
        """The text in force."""
        assert state.prompt_key is not None
        assert state.prompt is not None
        assert state.text_name is not None
        mix = None if state.blend is None else state.blend.mixture
        yield from self.set(kv, state.text_name, state.prompt_key, state.prompt, mix)

    def set(
        self,
        kv: KVState,
        name: str,
        key: str,
        prompt: Prompt,
        mix: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Generator[Encode, torch.Tensor, None]:
        """Attach a prompt's text, or what `mix` makes of its embedding, as the entry `name`."""
        store = kv.cache.conditioning
        embedding = None if name in store else (yield from self._embedding(key, prompt))
        if embedding is not None and mix is not None:
            embedding = mix(embedding)
        # acquired and attached without a yield between: a generator closed at the yield would leak the reference
        entry = store.acquire(name)
        if entry is None:
            assert embedding is not None
            entry = store.publish(name, self._spec.conditioning["text"], self._network.project("text", (embedding,)))
        kv.set_conditioning(BRANCH, "text", entry)

    def _embedding(self, key: str, prompt: Prompt) -> Generator[Encode, torch.Tensor, torch.Tensor]:
        """[text_len, text_dim]"""
        embedding = self._embeddings.get(key)
        if embedding is None:
            embedding = yield Encode("text", tuple(torch.from_numpy(part) for part in prompt))
            self._embeddings[key] = embedding
            if len(self._embeddings) > _MAX_EMBEDDINGS:
                self._embeddings.pop(next(iter(self._embeddings)))
        return embedding[0]

    def blend_from(self, state: State, num_blocks: int) -> Generator[Encode, torch.Tensor, Blend]:
        """From the text in force, a mixture or a prompt's."""
        assert state.prompt_key is not None
        assert state.prompt is not None
        assert state.text_name is not None
        old = yield from self._embedding(state.prompt_key, state.prompt)
        if state.blend is not None:
            old = state.blend.mixture(old)
        return Blend(old, state.text_name, num_blocks)
