"""Where a model lies: a folder, then a name in fledge's cache, then a hub id."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$FLEDGE_CACHE`, by default ~/.cache/fledge."""
    return Path(os.environ.get("FLEDGE_CACHE") or Path.home() / ".cache" / "fledge").expanduser()


def resolve_model_path(model_path: str) -> Path:
    """The folder that holds `config.json` of `model_path`.

    Raises:
        ValueError: it is none of the three, or the hub cannot be reached.
    """
    for folder in (Path(model_path).expanduser(), cache_dir() / "models" / model_path):
        if (folder / "config.json").is_file():
            return folder
    if Path(model_path).exists():
        raise ValueError(f"{model_path} has no config.json, so it is not a model folder")
    if model_path.count("/") != 1 or model_path.startswith((".", "/", "~")):
        raise ValueError(
            f"no model {model_path!r}: it is neither a folder nor a name in {cache_dir() / 'models'}. "
            "`fledge models fetch` puts the embedded model and its draft head there"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model_path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
        )
    except Exception as error:
        raise ValueError(
            f"{model_path!r} is no folder and no name in the cache, and could not be fetched from the hub "
            f"({type(error).__name__}); download it elsewhere and give the folder"
        ) from error
