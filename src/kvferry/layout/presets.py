# SPDX-License-Identifier: Apache-2.0
"""Caches of well-known models, to plan with them without a download."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.layout.hf import model_from_config
from kvferry.layout.model import CacheModel


@cache
def presets() -> dict[str, dict[str, Any]]:
    """By name, the parts of each model's public configuration that its cache depends on."""
    text = files("kvferry.layout").joinpath("presets.json").read_text()
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def load_model(name: str, **options: Any) -> CacheModel:
    """A preset, or the model at the path of a `config.json` or its folder.

    The options are those of `model_from_config`.
    """
    if name in presets():
        return model_from_config(presets()[name], name=name, **options)
    path = Path(name)
    if path.exists():
        return model_from_config(path, name=path.name.removesuffix(".json"), **options)
    raise DescriptionError(
        f"{name!r} is neither a preset nor a path of a config.json; presets are "
        f"{', '.join(presets())}"
    )
