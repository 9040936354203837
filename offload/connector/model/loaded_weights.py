"""Digests the weights that a worker holds in memory, whatever files they came from.

Weights can change during sleep mode, and vLLM does not notify connectors of such a change. The
digest is computed on the device, in one pass over the weights.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.worker.device_digest import digest_of_bytes


class LoadedWeights:
    """The models of this process to which ``layers`` belong: a model and its draft model."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self._models: list[weakref.ref[nn.Module]] = []

    def digest(self) -> bytes | None:
        """32 bytes that differ when a parameter or buffer differs; ``None`` if the model was not
        found. Waits for the device."""
        models = self._find()
        if not models:
            return None
        total = hashlib.sha256()
        seen: set[int] = set()
        for model in models:
            for name, tensor in _tensors(model):
                total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen and storage.nbytes():
                    seen.add(storage.data_ptr())
                    content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    total.update(b"%d\n" % digest_of_bytes(content.set_(storage)))
        return total.digest()

    def _find(self) -> list[nn.Module]:
        """The outermost modules that hold one of the layers. vLLM passes connectors the layers, not
        the model, so this searches all objects of the process once."""
        models = [model for ref in self._models if (model := ref()) is not None]
        if self._models and len(models) == len(self._models):
            return models
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        inner = {id(child) for module in modules for child in module.children()}
        wanted = {id(layer) for layer in self._layers.values()}
        outer = [module for module in modules if id(module) not in inner]
        models = [m for m in outer if any(id(each) in wanted for each in m.modules())]
        models.sort(key=lambda model: type(model).__qualname__)
        self._models = [weakref.ref(model) for model in models]
        return models


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(found):
        yield name, found[name].detach()
