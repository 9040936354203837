"""The settings, environment variables and library versions that influence a KV block, apart from
the model's files.

All settings count except the names in `offload.connector.model.cannot_change_kv`. Values that are
vLLM's defaults are left out, because vLLM's version is in the namespace.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo
from vllm import envs

from offload.connector.model.cannot_change_kv import OTHER_VARIABLES, fields_of, variables

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TEXT_MAX = 512
"""Longer values are replaced by a digest: a manifest has 64 KiB."""
_SECRET = re.compile(r"secret|password|credential|access_key|api_key|auth_token", re.IGNORECASE)
_KERNELS = (
    "aiter",
    "amd-aiter",
    "compressed-tensors",
    "deep-ep",
    "deep-gemm",
    "fbgemm-gpu",
    "flash-attn",
    "flashinfer-python",
    "intel-extension-for-pytorch",
    "nvidia-cutlass-dsl",
    "tensorizer",
    "tilelang",
    "torch",
    "torchao",
    "transformers",
    "triton",
    "zentorch",
)
_MEDIA = (
    "av",
    "librosa",
    "mistral-common",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "scipy",
    "soundfile",
    "soxr",
    "torchaudio",
    "torchcodec",
    "torchvision",
)
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
_OURS = "kvtiers"


def settings_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """vLLM's settings that may change KV and are not its defaults, by path.

    Settings of the model and its draft are left out: `offload.connector.model.identity` adds them.
    """
    own = {"model_config"}
    return {
        path: value for path, value in counting(vllm_config) if path.partition(".")[0] not in own
    }


def counting(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, plain value) of every field of a configuration object that may change KV and
    does not have its default value. Nested objects are searched, too."""
    harmless = fields_of(type(config).__name__)
    if harmless is None:
        return
    for field in dataclasses.fields(config):
        if field.name in harmless:
            continue
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
            yield from ((f"{field.name}.{path}", each) for path, each in counting(value))
        elif (found := plain(value)) != plain(_default(field)):
            yield field.name, found


def environment_of(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The environment variables that are set and may change KV; ``more`` contains names that the
    model's code reads."""
    known = {*envs.environment_variables, *OTHER_VARIABLES.split(), *more} - variables()
    return {name: _short(environ[name]) for name in sorted(known & environ.keys())}


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def libraries(*, media: bool) -> dict[str, str]:
    """Versions of the libraries, besides vLLM, that take part in the computation.

    These are packages with kernels and models, plugins of vLLM and, with ``media``, the packages
    that decode and prepare images, video and sound.
    """
    found: dict[str, str] = {}
    for name in (*_KERNELS, *(_MEDIA if media else ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for group in _PLUGINS:
        for entry in metadata.entry_points(group=group):
            if entry.dist is not None and entry.dist.name != _OURS:
                found[entry.dist.name] = entry.dist.version
    return found


def plain(value: Any) -> Any:
    """A setting as JSON that is equal in every process and at every start.

    Enums become names, and long values become digests. Values that look like credentials are
    removed.
    """
    found = _json(value)
    text = json.dumps(found, sort_keys=True)
    return found if len(text) <= TEXT_MAX else f"sha256 {_digest(text)}"


def _json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):  # an address may contain a credential
        return f"sha256 {_digest(value)}" if "://" in value else value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        kept = ((str(key), each) for key, each in value.items() if not _SECRET.search(str(key)))
        return {key: _json(each) for key, each in kept}
    if isinstance(value, Set):
        return sorted(map(_json, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    return _object(value)


def _object(value: Any) -> Any:
    """A plain object as JSON; never its ``repr``, which may contain its memory address."""
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is value:
        return name
    if dataclasses.is_dataclass(value):
        return {each.name: _json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(getattr(value, "compute_hash", None)):
        return f"{name} {value.compute_hash()}"
    if isinstance(value, os.PathLike) or type(value).__module__.partition(".")[0] == "torch":
        return str(value)
    return {"": name, **_json(getattr(value, "__dict__", {}))}


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; ``None`` if it has none."""
    default = field.default
    if isinstance(default, FieldInfo):  # pydantic keeps its field description there
        if default.is_required():
            return None
        return default.get_default(call_default_factory=True, validated_data={})
    if default is not dataclasses.MISSING:
        return default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"sha256 {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def file_digest(path: str | None) -> str | None:
    """A digest of the file that a setting names; ``None`` if it cannot be read."""
    if not path or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        digest = hashlib.sha256()
        for part in iter(partial(file.read, 1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()[:32]
