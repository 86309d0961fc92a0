"""Keys of processor_config.json as released, and keys that nobody reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import Registry, UsageError
from mm_plugin_deepseekvl2.testing import make_checkpoint


def changed(folder: Path, **settings: Any) -> Path:
    path = make_checkpoint(folder)
    file = path / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"add_special_token": False, "ignore_id": -100, "mask_prompt": False, "sft_format": "deepseek"},
        {"add_special_token": True, "ignore_id": -1, "mask_prompt": True, "normalize": True},
        {
            "processor_class": "DeepseekVLV2Processor",
            "auto_map": {"AutoProcessor": "x"},
            "transformers_version": "4.38",
        },
        {"image_token": "<image>", "crop": None, "normalize": None},
    ],
    ids=str,
)
def test_keys_of_released_files_are_known(registry: Registry, tmp_path: Path, settings: dict[str, Any]) -> None:
    assert registry.load_processor(changed(tmp_path, **settings)).options.normalize


@pytest.mark.parametrize(
    "settings",
    [
        {"crop": True},
        {"do_normalize": False},
        {"base_size": 1024},
        {"image_token": "<img>"},
        {"sft_format": "plain"},
        {"size": {"a": 1}},
    ],
    ids=str,
)
def test_others_are_refused_with_file_and_key(registry: Registry, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"processor_config\.json.*{next(iter(settings))}") as caught:
        registry.load_processor(changed(tmp_path, **settings))
    assert caught.value.argument == "checkpoint"
