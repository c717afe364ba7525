"""The ``config.json`` of an exported Hugging Face folder: whence it comes, and its dtype."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.locate import read_run_config
from paceline.checkpoint.storage.local import LocalStorage
from paceline.errors import CheckpointError
from paceline.untrusted import MIB, parse_json, read_text

INFO_KEY = "hf_config"
"""Where an import leaves the ``config.json`` in the checkpoint's info."""
_HARMLESS = ("revision", "subfolder")
"""Arguments of ``from_pretrained`` that make nobody connect to anywhere."""


def hf_config(
    checkpoint: Checkpoint,
    given: str | os.PathLike[str] | None,
    dtype: str,
    *,
    follow: bool = False,
) -> dict[str, Any]:
    """The settings for the model in ``checkpoint``, whose weights will be of ``dtype``.

    From the file or folder that was ``given``; else from the folder the checkpoint was imported
    from; else of the pretrained model that the run's config names. No code of the run is executed.
    Only where ``follow`` is set is anything fetched from where the run's config says.
    """
    if given is not None:
        found = _from_file(Path(given))
    elif isinstance(imported := checkpoint.manifest.info.get(INFO_KEY), dict):
        found = dict(imported)
    else:
        found = _from_run(checkpoint, follow)
    # A loader that trusts an old value here would load the weights in that precision.
    found.pop("torch_dtype", None)
    return {**found, "dtype": dtype}


def _from_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = parse_json(read_text(file, MIB))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise CheckpointError(
            f"{file} is no Hugging Face config: it has no 'model_type'. Save one with "
            "model.config.save_pretrained(folder)."
        )
    return found


def _from_run(checkpoint: Checkpoint, follow: bool) -> dict[str, Any]:
    """By what the run's config says of the model: a pretrained one, or nothing that helps."""
    target, args = _model_of_run(checkpoint)
    name = args.get("pretrained_model_name_or_path")
    is_pretrained = target.startswith("transformers:") and target.endswith(".from_pretrained")
    if is_pretrained and name and "trust_remote_code" not in args:
        return _pretrained(str(name), args, target, follow)
    raise CheckpointError(
        f"no Hugging Face config is known for {checkpoint.path}: it was not imported from a "
        "Hugging Face folder, and no run config beside it names transformers' from_pretrained. "
        "Save one with model.config.save_pretrained(folder) and pass that folder (--hf-config)."
    )


def _model_of_run(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    if not isinstance(checkpoint.storage, LocalStorage):
        return "", {}
    file = checkpoint.storage.root.parent / "config.yaml"
    if not file.is_file():
        return "", {}
    read = read_run_config(file)
    model = read.get("model") if isinstance(read, dict) else None
    if not isinstance(model, dict):
        return "", {}
    args = model.get("args")
    return str(model.get("target", "")), args if isinstance(args, dict) else {}


def _pretrained(name: str, args: dict[str, Any], target: str, follow: bool) -> dict[str, Any]:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise CheckpointError(
            f"the run's model is {target} of {name!r}, and transformers is not installed here. "
            "Install it, or pass the folder of a config.json (--hf-config)."
        ) from None
    others = {k: v for k, v in args.items() if k != "pretrained_model_name_or_path"}
    if not follow and "://" in name:
        raise CheckpointError(
            f"the run's model is {target} of {name!r}, which was not contacted. Pass the folder of "
            "a config.json (--hf-config), or have it fetched (--follow)."
        )
    if not follow:  # what this machine has; not by way of a proxy or mirror that the config names
        others = {k: v for k, v in others.items() if k in _HARMLESS}
        others["local_files_only"] = True
    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(
            name, trust_remote_code=False, **others
        ).to_dict()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the config of {name!r}, the run's model, cannot be loaded"
            f"{'' if follow else ' without fetching it'}: {error} Pass the folder of a config.json "
            f"(--hf-config){'' if follow else ', or have it fetched (--follow)'}."
        ) from error
    return found
