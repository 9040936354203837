"""Examines what a user named as the model, before vLLM is imported.

vLLM needs half a minute to find that a folder contains no model, that a name is not on the hub, or
that the hub cannot be reached. All of this can be found in a moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from offload.cli.vllm_flags import has_flag

CONFIGS = ("config.json", "params.json")
"""The files that describe a model, as Hugging Face and as Mistral name them."""
ELSEWHERE = ("--config", "--config-format", "--hf-config-path")
"""With these flags, vLLM reads the model's configuration from other files or in other formats."""
OTHER_NAMES = ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH")
"""With these variables, vLLM finds names that the hub does not know."""
HUB = "https://huggingface.co"
HUB_PATIENCE_S = 2.0

FOLDER_FIX = "Give a folder with a config.json, or the name of a model on the hub"


def wrong_path(model: str, flags: list[str]) -> tuple[str, str] | None:
    """Say why there is no model at this path, and what to do. ``None`` for a name on the hub."""
    path = Path(model)
    if not os.path.exists(model):
        is_path = model.startswith(("/", "./", "../", "~"))
        return ("does not exist", FOLDER_FIX) if is_path else None
    if any(has_flag(flags, name) for name in ELSEWHERE):
        return None
    if path.is_file():
        is_model = path.suffix == ".gguf"  # a plug-in of vLLM reads these
        return None if is_model else ("is a file", FOLDER_FIX)
    found = [path / name for name in CONFIGS if (path / name).is_file()]
    return _unreadable(found[0]) if found else ("has no config.json", _where_it_is(path))


def _unreadable(config: Path) -> tuple[str, str] | None:
    try:
        with config.open("rb") as file:
            json.load(file)
    except OSError as error:
        return f"has a {config.name} that cannot be read ({error.strerror})", "Check its mode"
    except (ValueError, RecursionError) as error:
        return f"has a {config.name} that is not JSON ({error})", "Download or copy it again"
    return None


def _where_it_is(folder: Path) -> str:
    """Suggest what the user may have meant."""
    if (folder / "adapter_config.json").is_file():
        return "It is an adapter: give its base model, and the adapter with --lora-modules"
    below = sorted(p for glob in ("*", "snapshots/*") for p in folder.glob(f"{glob}/config.json"))
    return f"Did you mean {below[0].parent}?" if below else FOLDER_FIX


def wrong_name(
    model: str, flags: list[str], environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """Ask the hub about a name, and say why vLLM would not find it, and what to do.

    ``None`` if vLLM may find it. A hub that does not answer in time is named on stderr, because
    vLLM will wait for it, too.
    """
    if os.path.exists(model) or ":" in model:  # a folder, a URL, or one file of a model
        return None
    if any(has_flag(flags, name) for name in ("--hf-token", "--download-dir", *ELSEWHERE)):
        return None
    if any(environment.get(name) for name in OTHER_NAMES):
        return None
    try:
        from huggingface_hub import HfApi, errors  # noqa: F401  # this may take longer than _query_hub has
    except ImportError:
        return None  # it comes with vLLM, which is reported as missing next
    hub = environment.get("HF_ENDPOINT", "").rstrip("/") or HUB
    found: list[tuple[str, str] | None] = []
    asking = threading.Thread(
        target=lambda: found.append(_query_hub(model, hub)), name="kvtiers-hub", daemon=True
    )
    asking.start()
    asking.join(HUB_PATIENCE_S)  # resolving the hub's name has no time limit
    if found:
        return found[0]
    line = f"{hub} has not answered for {HUB_PATIENCE_S:g} s; vLLM waits for it, too"
    fix = "Set HF_HUB_OFFLINE=1 to use local copies only"
    print(f"kvtiers: {line}. {fix}", file=sys.stderr, flush=True)
    return None


def _query_hub(model: str, hub: str) -> tuple[str, str] | None:
    """Ask the hub about a name, and translate its answer."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi(endpoint=hub).model_info(model, timeout=30.0)
    except errors.HFValidationError:
        return "is neither a folder nor a possible name on the hub", FOLDER_FIX
    except errors.GatedRepoError:
        return None  # vLLM explains how to get access
    except errors.RepositoryNotFoundError:
        if _has_copy(model):
            return None
        fix = "Check the name. A private model needs a token: HF_TOKEN"
        return f"is not a folder, and {hub} lists no such model", fix
    except errors.HfHubHTTPError:
        return None  # the hub has answered, and vLLM asks it again
    except errors.OfflineModeIsEnabled:
        return _not_here(model, "HF_HUB_OFFLINE is set")
    except Exception as error:  # the library raises the errors of its HTTP client
        reason = str(error).partition("\n")[0] or type(error).__name__
        return _not_here(model, f"{hub} cannot be reached ({reason})")
    return None


def _not_here(model: str, why: str) -> tuple[str, str] | None:
    if _has_copy(model):
        return None
    fix = "Give a folder, or download the model where there is a network"
    return f"is not a folder and has no local copy, and {why}", fix


def _has_copy(model: str) -> bool:
    """True if the hub's library has downloaded this model, or a part of it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model, repo_type="model")
    return any(Path(constants.HF_HUB_CACHE, folder, "snapshots").glob("*/*"))
