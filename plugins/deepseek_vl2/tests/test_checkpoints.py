"""Released folders open by their model type; what is broken in one is said by file and key, or by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_plugin import NoModelError, Registry, UsageError
from mm_plugin_deepseekvl2.testing import make_checkpoint, tiny_config, tiny_settings


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    described = json.loads((folder / name).read_text(encoding="utf-8"))
    change(described)
    (folder / name).write_text(json.dumps(described), encoding="utf-8")


# --- what is served -----------------------------------------------------------------------------------------------------


def test_the_maker_lays_a_folder_out_as_released_ones_are(checkpoint: Path) -> None:
    names = sorted(file.name for file in checkpoint.iterdir())
    assert [name for name in names if name.endswith(".safetensors")] == [
        "model-00001-of-000002.safetensors",
        "model-00002-of-000002.safetensors",
    ]
    assert {"config.json", "processor_config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(names)
    assert "preprocessor_config.json" not in names
    config = json.loads((checkpoint / "config.json").read_text())
    assert "architectures" not in config
    assert config["language_config"]["architectures"] == ["DeepseekV2ForCausalLM"]


def test_a_folder_is_known_by_its_model_type_and_by_its_architecture(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    assert registry.load_processor(folder).spec.name == "deepseek_vl2"
    assert registry.load_encoder(folder).version.startswith("deepseek_vl2:1:")
    edited(folder, "config.json", lambda config: config.update(architectures=["DeepseekVLV2ForCausalLM"]))
    assert registry.load_processor(folder).spec.name == "deepseek_vl2"
    # The language model's own architecture, nested, is never read.
    edited(folder, "config.json", lambda config: (config.pop("architectures"), config.pop("model_type")))
    with pytest.raises(NoModelError):
        registry.load_processor(folder)


def test_what_released_files_leave_out_has_the_model_codes_defaults(registry: Registry, tmp_path: Path) -> None:
    config = tiny_config()
    config["vision_config"] |= {"width": 1152, "layers": 0 + 1}
    for name in ("image_size", "heads"):
        del config["vision_config"][name]
    config["projector_config"] = {"n_embed": 24}
    for name in ("tile_tag", "global_view_pos"):
        del config[name]
    folder = make_checkpoint(tmp_path, config=config, shards=1)
    for name in ("image_mean", "image_std", "normalize", "image_token", "sft_format"):
        edited(folder, "processor_config.json", lambda settings, name=name: settings.pop(name))
    options = registry.load_processor(folder).options
    assert (options.image_size, options.image_mean, options.normalize) == (384, (0.5, 0.5, 0.5), True)
    encoder: Any = registry.load_encoder(folder)
    assert encoder._tower.vision.blocks[0].attn.heads == 16


# --- what is broken -----------------------------------------------------------------------------------------------------


@pytest.mark.case("8.5")
@pytest.mark.parametrize("key", ["candidate_resolutions", "patch_size", "downsample_ratio"])
def test_a_setting_that_is_missing_is_named_with_its_file(registry: Registry, tmp_path: Path, key: str) -> None:
    folder = make_checkpoint(tmp_path)
    edited(folder, "processor_config.json", lambda settings: settings.pop(key))
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError) as caught:
            load(folder)
        assert str(folder / "processor_config.json") in caught.value.message
        assert f"`{key}`" in caught.value.message


@pytest.mark.parametrize("key", ["width", "layers", "patch_size", "mlp_ratio"])
def test_a_number_of_the_tower_that_is_missing_is_named_with_its_file(
    registry: Registry, tmp_path: Path, key: str
) -> None:
    folder = make_checkpoint(tmp_path)
    edited(folder, "config.json", lambda config: config["vision_config"].pop(key))
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError) as caught:
            load(folder)
        assert str(folder / "config.json") in caught.value.message
        assert f"`{key}`" in caught.value.message
        assert "vision_config" in caught.value.message


def test_a_tower_that_is_not_described_at_all_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edited(folder, "config.json", lambda config: config.pop("vision_config"))
    with pytest.raises(UsageError, match=r"config\.json.*`vision_config`"):
        registry.load_processor(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"candidate_resolutions": []}, "candidate_resolutions"),
        ({"candidate_resolutions": [[384]]}, "candidate_resolutions"),
        ({"candidate_resolutions": [[384, 384], [384, 500]]}, "384 x 500"),
        ({"candidate_resolutions": [[384, 384], [0, 384]]}, "candidate_resolutions"),
        ({"candidate_resolutions": [[336, 336]]}, r"candidate_resolutions\[0\] \(336, 336\).*\(384, 384\)"),
        ({"candidate_resolutions": [[384, 768], [384, 384]]}, r"candidate_resolutions\[0\]"),
        ({"patch_size": 16}, "patch_size 16.*14"),
        ({"patch_size": "14"}, "patch_size"),
        ({"downsample_ratio": 1}, "downsample_ratio 1.*2"),
        ({"downsample_ratio": 0}, "downsample_ratio"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, 7]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"image_token": "<img>"}, "image_token"),
        ({"sft_format": "plain"}, "sft_format"),
    ],
)
def test_settings_that_are_not_the_models_are_refused(
    registry: Registry, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = make_checkpoint(tmp_path, settings=tiny_settings() | change)
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match=said) as caught:
            load(folder)
        assert str(folder) in caught.value.message


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("", {"tile_tag": "1D"}, "tile_tag"),
        ("", {"global_view_pos": "middle"}, "global_view_pos"),
        ("vision_config", {"class_token": True}, "class_token"),
        ("vision_config", {"heads": 5}, "5 heads"),
        ("vision_config", {"layers": -1}, "layers"),
        ("vision_config", {"patch_size": 400}, "patch_size"),
        ("projector_config", {"projector_type": "low_high_hybrid_split_mlp_gelu"}, "projector_type"),
        ("projector_config", {"token_pooling": True}, "token_pooling"),
        ("projector_config", {"input_dim": 64}, "input_dim"),
        ("projector_config", {"depth": 1}, "depth"),
        ("projector_config", {"projector_type": "identity"}, "identity"),
    ],
)
def test_configs_that_are_not_served_are_refused_by_their_key(
    registry: Registry, tmp_path: Path, part: str, change: dict[str, Any], said: str
) -> None:
    folder = make_checkpoint(tmp_path)
    edited(folder, "config.json", lambda config: (config[part] if part else config).update(change))
    for load in (registry.load_processor, registry.load_encoder):
        with pytest.raises(UsageError, match=said) as caught:
            load(folder)
        assert str(folder / "config.json") in caught.value.message
