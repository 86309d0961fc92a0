"""Settings as releases, fine-tunes and several versions of transformers write them, and settings that would be served wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import Registry, UsageError
from mm_plugin_qwen25vl.testing import make_checkpoint

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
RELEASED = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": MEAN, "image_std": STD,
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
STEPS = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "rescale_factor": 0.00392156862745098,
}  # fmt: skip
EDGES = {"longest_edge": 12845056, "shortest_edge": 3136}
NULLS = dict.fromkeys(
    (
        "crop_size",
        "device",
        "disable_grouping",
        "do_center_crop",
        "do_pad",
        "input_data_format",
        "return_tensors",
        "pad_size",
    )
)
SAVED = {
    "4.45": RELEASED | STEPS | {"size": {"max_pixels": 12845056, "min_pixels": 3136}, "vision_token_id": 151654},
    "4.49": RELEASED | STEPS | {"size": EDGES},
    "4.53, fast": RELEASED | STEPS | NULLS
    | {"size": EDGES, "data_format": "channels_first", "default_to_square": True,
       "image_processor_type": "Qwen2VLImageProcessorFast"},
    "5": {name: value for name, value in RELEASED.items() if "pixels" not in name} | STEPS | {"size": EDGES},
}  # fmt: skip
VIDEO = RELEASED | STEPS | NULLS | {
    "size": EDGES, "data_format": "channels_first", "default_to_square": True, "do_sample_frames": False, "fps": None,
    "max_frames": 768, "min_frames": 4, "num_frames": None, "size_divisor": None, "video_metadata": None,
    "return_metadata": False, "video_processor_type": "Qwen2VLVideoProcessor",
}  # fmt: skip


def write(folder: Path, name: str, settings: Any) -> Path:
    path = make_checkpoint(folder)
    (path / name).write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("version", SAVED)
def test_settings_of_images_as_transformers_saves_them(registry: Registry, tmp_path: Path, version: str) -> None:
    options = registry.load_processor(write(tmp_path, "preprocessor_config.json", SAVED[version])).options
    assert (options.min_pixels, options.max_pixels, options.patch_size) == (3136, 12845056, 14)
    assert options.video_max_pixels == 602_112


@pytest.mark.parametrize("name", ["video_preprocessor_config.json", "processor_config.json"])
def test_settings_of_videos_as_transformers_saves_them(registry: Registry, tmp_path: Path, name: str) -> None:
    settings: Any = VIDEO
    if name == "processor_config.json":
        image = {key: value for key, value in SAVED["5"].items() if key != "processor_class"}
        settings = {"image_processor": image, "video_processor": VIDEO, "processor_class": "Qwen2_5_VLProcessor"}
    options = registry.load_processor(write(tmp_path, name, settings)).options
    assert (options.max_pixels, options.video_max_pixels, options.max_frames) == (12845056, 602_112, 768)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"do_normalize": False}, "do_normalize"),
        ({"do_resize": False}, "do_resize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_pad": True}, "do_pad"),
        ({"resample": 2}, "resample"),
        ({"size": {"height": 224, "width": 224}}, "size.height"),
        ({"size": {"shortest_edge": 336, "max_height": 5}}, "size.max_height"),
        ({"size": 336}, "size"),
        ({"image_size": 448}, "image_size"),
        ({"spatial_merge_size": 2}, "spatial_merge_size"),
        ({"image_processor": {"do_resize": True}}, "image_processor"),
        ({"tokenizer": {}}, "tokenizer"),
        ({"max_pixel": 1}, "max_pixel"),
        ({"max_ratio": 100}, "max_ratio"),
    ],
    ids=str,
)
def test_what_would_be_served_wrongly_is_refused(
    registry: Registry, tmp_path: Path, changed: dict[str, Any], key: str
) -> None:
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match=key) as caught:
            load(write(tmp_path, "preprocessor_config.json", RELEASED | changed))
        assert str(tmp_path) in caught.value.message
    write(tmp_path, "preprocessor_config.json", RELEASED | dict.fromkeys(changed))
    registry.load_processor(tmp_path)


def test_limits_of_frames_in_the_videos_own_file_are_not_ignored(registry: Registry, tmp_path: Path) -> None:
    path = write(tmp_path, "video_preprocessor_config.json", VIDEO | {"max_pixels": 200_704})
    with pytest.raises(UsageError, match=r"video_preprocessor_config\.json: .*max_pixels"):
        registry.load_processor(path)
    options = registry.load_processor(path, video_max_pixels=200_704).options
    assert options.video_max_pixels == 200_704
    registry.load_encoder(path)  # which reads the settings of images alone
