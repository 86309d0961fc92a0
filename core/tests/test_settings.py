"""Settings: defaults, the environment, overrides, and that no invalid value gets in by any way."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from mm_plugin import Settings, UsageError, discover

ENVIRONMENT = [
    ("MM_PLUGIN_ONLY", "qwen2_vl", "only", ("qwen2_vl",)),
    ("MM_PLUGIN_ONLY", " a, b ,,c, ", "only", ("a", "b", "c")),
    ("MM_PLUGIN_DISABLED", "a,b", "disabled", ("a", "b")),
    ("MM_PLUGIN_STRICT", "1", "strict", True),
    ("MM_PLUGIN_STRICT", "true", "strict", True),
    ("MM_PLUGIN_STRICT", "0", "strict", False),
    ("MM_PLUGIN_STRICT", "false", "strict", False),
    ("MM_PLUGIN_MEDIA_ROOT", "/srv/media", "media_root", "/srv/media"),
    ("MM_PLUGIN_MAX_MEDIA_BYTES", "1000", "max_media_bytes", 1000),
    ("MM_PLUGIN_MAX_IMAGE_PIXELS", "1", "max_image_pixels", 1),
    ("MM_PLUGIN_MAX_ITEMS", " 3 ", "max_items", 3),
    ("MM_PLUGIN_MAX_IMAGES", "4", "max_images", 4),
    ("MM_PLUGIN_MAX_VIDEOS", "5", "max_videos", 5),
    ("MM_PLUGIN_MAX_AUDIOS", "6", "max_audios", 6),
    ("MM_PLUGIN_MAX_DECODE_BYTES", "100", "max_decode_bytes", 100),
    ("MM_PLUGIN_MAX_VIDEO_FRAMES", "100", "max_video_frames", 100),
    ("MM_PLUGIN_MAX_VIDEO_SECONDS", "2.5", "max_video_seconds", 2.5),
    ("MM_PLUGIN_MAX_AUDIO_SECONDS", "30", "max_audio_seconds", 30.0),
    ("MM_PLUGIN_MAX_REQUEST_PIXELS", "8", "max_request_pixels", 8),
    ("MM_PLUGIN_MAX_MEDIA_PACKETS", "11", "max_media_packets", 11),
    ("MM_PLUGIN_MAX_DECODED_PIXELS", "12", "max_decoded_pixels", 12),
    ("MM_PLUGIN_ALLOWED_HOSTS", "a.example, *.b.example", "allowed_hosts", ("a.example", "*.b.example")),
    ("MM_PLUGIN_PRIVATE_HOSTS", "a.example", "private_hosts", ("a.example",)),
    ("MM_PLUGIN_FETCH_SECONDS", "1.5", "fetch_seconds", 1.5),
    ("MM_PLUGIN_MAX_REDIRECTS", "0", "max_redirects", 0),
    ("MM_PLUGIN_MAX_ITEM_TOKENS", "7", "max_item_tokens", 7),
    ("MM_PLUGIN_MAX_RENDERED_CHARS", "700", "max_rendered_chars", 700),
    ("MM_PLUGIN_RENDER_SECONDS", "2.5", "render_seconds", 2.5),
    ("MM_PLUGIN_MAX_CALLER_HASHES", "9", "max_caller_hashes", 9),
    ("MM_PLUGIN_PREPROCESS_CACHE_BYTES", "0", "preprocess_cache_bytes", 0),
    ("MM_PLUGIN_EMBEDDING_CACHE_BYTES", "123456789012", "embedding_cache_bytes", 123456789012),
    ("MM_PLUGIN_MAX_REQUEST_BYTES", "1000", "max_request_bytes", 1000),
    ("MM_PLUGIN_MAX_REQUEST_AUDIO_SECONDS", "60.5", "max_request_audio_seconds", 60.5),
    ("MM_PLUGIN_PREPROCESS_STORE", "shared", "preprocess_store", "shared"),
    ("MM_PLUGIN_EMBEDDING_STORE", "shared", "embedding_store", "shared"),
    ("MM_PLUGIN_THREADS", "2", "threads", 2),
]
WRONG = [
    ("MM_PLUGIN_STRICT", "maybe"),
    ("MM_PLUGIN_MAX_ITEMS", "0"),
    ("MM_PLUGIN_MAX_ITEMS", "-1"),
    ("MM_PLUGIN_MAX_ITEMS", "many"),
    ("MM_PLUGIN_MAX_IMAGE_PIXELS", "1.5"),
    ("MM_PLUGIN_MAX_MEDIA_BYTES", "64M"),
    ("MM_PLUGIN_PREPROCESS_CACHE_BYTES", "-1"),
    ("MM_PLUGIN_THREADS", "0"),
]
WRONG_VALUES: list[tuple[str, Any]] = [
    ("only", "qwen2_vl"),
    ("disabled", "qwen2_vl"),
    ("disabled", (1,)),
    ("strict", "yes"),
    ("max_items", 0),
    ("max_items", "3"),
    ("max_video_seconds", 0.0),
    ("fetch_seconds", -1.0),
    ("max_redirects", -1),
    ("threads", 0),
    ("embedding_cache_bytes", -1),
    ("media_root", None),
]


def test_the_defaults_are_those_that_are_documented() -> None:
    found = Settings.from_env({})
    assert (found.only, found.disabled, found.strict, found.media_root) == ((), (), False, "")
    assert (found.preprocess_store, found.embedding_store) == ("memory", "memory")
    # Encoded bytes 64 MiB; pixels as Pillow warns: 1 GiB / 4 bytes / 3 channels.
    assert found.max_media_bytes == 67_108_864
    assert found.max_image_pixels == 1024**3 // 4 // 3
    assert (found.max_items, found.max_item_tokens) == (256, 131_072)
    assert found.preprocess_cache_bytes == found.embedding_cache_bytes == 1_073_741_824
    assert 1 <= found.threads <= 8


@pytest.mark.parametrize(("variable", "text", "name", "value"), ENVIRONMENT)
def test_a_variable_sets_its_field_and_no_other(variable: str, text: str, name: str, value: Any) -> None:
    found = msgspec.structs.asdict(Settings.from_env({variable: text, "UNRELATED": "1"}))
    assert found[name] == value
    assert type(found[name]) is type(value)
    expected = msgspec.structs.asdict(Settings())
    assert {key: found[key] for key in found if key != name} == {key: expected[key] for key in expected if key != name}


def test_every_field_has_a_tested_variable() -> None:
    assert {name for _, _, name, _ in ENVIRONMENT} == set(Settings.__struct_fields__)


@pytest.mark.parametrize("text", ["", "   "])
@pytest.mark.parametrize("variable", sorted({variable for variable, *_ in ENVIRONMENT}))
def test_an_empty_variable_is_ignored(variable: str, text: str) -> None:
    assert Settings.from_env({variable: text}) == Settings()


@pytest.mark.parametrize(("variable", "text"), WRONG)
def test_a_wrong_variable_is_named_with_its_value(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{variable}={text!r}")) as caught:
        Settings.from_env({variable: text})
    assert caught.value.argument == variable


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_a_wrong_value_is_refused_as_an_override(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        Settings.from_env({}, **{name: value})


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_a_wrong_value_is_refused_by_the_constructor(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        Settings(**{name: value})
    assert caught.value.argument == name


def test_an_override_wins_over_the_environment() -> None:
    found = Settings.from_env({"MM_PLUGIN_MAX_ITEMS": "3", "MM_PLUGIN_THREADS": "1"}, max_items=5)
    assert (found.max_items, found.threads) == (5, 1)


def test_an_unknown_override_is_named() -> None:
    with pytest.raises(UsageError, match="max_itms"):
        Settings.from_env({}, max_itms=5)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().max_items = 5  # type: ignore[misc]


def test_the_environment_of_the_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.__struct_fields__:
        monkeypatch.delenv(f"MM_PLUGIN_{name.upper()}", raising=False)
    monkeypatch.setenv("MM_PLUGIN_MAX_ITEMS", "9")
    assert Settings.from_env().max_items == 9
    with discover() as registry:
        assert registry.settings.max_items == 9
    monkeypatch.setenv("MM_PLUGIN_MAX_ITEMS", "nine")
    with pytest.raises(UsageError, match="MM_PLUGIN_MAX_ITEMS"):
        discover()


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_every_field_is_documented(name: str) -> None:
    assert re.search(rf"^\s+{name}: \S", Settings.__doc__ or "", re.MULTILINE)


def test_a_variable_is_spelled_as_the_docstring_says() -> None:
    assert "`max_image_pixels` is `MM_PLUGIN_MAX_IMAGE_PIXELS`" in (Settings.__doc__ or "")


def test_the_pixel_limit_is_the_one_above_which_pillow_warns() -> None:
    from PIL import Image

    assert Settings().max_image_pixels == Image.MAX_IMAGE_PIXELS


def test_an_unknown_variable_is_reported_with_the_nearest_that_exists() -> None:
    from mm_plugin.settings import unknown_variables

    found = unknown_variables({"MM_PLUGIN_DISABELD": "x", "MM_PLUGIN_ONLY": "y", "OTHER": "z"})
    assert found == ["environment variable MM_PLUGIN_DISABELD is not a setting; did you mean MM_PLUGIN_DISABLED?"]
