"""From prompt, images and videos to logits: what comes out is what transformers' whole model makes of the same pixels."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm_plugin import Modality, ModelProcessor, MultimodalProcessorOutput, Registry, VideoFrames
from mm_plugin.cache import EmbeddingCache
from mm_plugin.encoder import Encoder
from mm_plugin.testing import CallCounter, embed_in_chunks
from mm_plugin_qwen25vl.testing import make_checkpoint

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
PROMPTS = [
    "the thing is in the other one",
    f"{IMAGE}what is this?",
    f"{VIDEO}what happens?",
    f"see {IMAGE}{VIDEO} now",
    f"see {VIDEO}{IMAGE}",
    f"{VIDEO} then\n{VIDEO}{IMAGE} and {VIDEO}.",
    f"a {IMAGE} then {VIDEO}\n\n{IMAGE}. {VIDEO} the end",
]
SIZES = [(56, 56), (70, 100), (29, 120)]
VIDEOS = [(4, 56, 84, 2.0), (5, 84, 56, 0.5), (1, 56, 56, 1.0)]


def media(
    prompt: str, make_image: Callable[..., Image.Image], moving: Callable[..., np.ndarray]
) -> dict[str, list[Any]]:
    images, footages = itertools.cycle(enumerate(SIZES)), itertools.cycle(VIDEOS)
    given: dict[str, list[Any]] = {"images": [], "videos": []}
    for _ in range(prompt.count("image_pad")):
        index, size = next(images)
        given["images"].append(make_image(index, *size))
    for _ in range(prompt.count("video_pad")):
        *shape, fps = next(footages)
        given["videos"].append(VideoFrames(moving(*shape), fps=fps))
    return given


def reference(
    model: Any, output: MultimodalProcessorOutput, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and embeddings of transformers' model on its own reading of the same ids and float pixels, at these positions."""
    ids = torch.from_numpy(output.input_ids)[None]
    vision: dict[str, Any] = {}
    for modality, pixels, grid in (
        (Modality.IMAGE, "pixel_values", "image_grid_thw"),
        (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in output.mm_items if item.modality is modality]
        if items:
            vision[pixels] = torch.from_numpy(np.concatenate([item.feature for item in items]))
            vision[grid] = torch.from_numpy(np.concatenate([item.get(grid) for item in items]))
    seconds = [float(item.second_per_grid_ts[0]) for item in output.mm_items if item.modality is Modality.VIDEO]
    token_types = torch.from_numpy(output.token_modalities.astype(np.int32))[None]
    caught: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _arguments, named: caught.append(named["inputs_embeds"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                mm_token_type_ids=token_types,
                second_per_grid_ts=torch.tensor(seconds),
                position_ids=positions,
                **vision,
            ).logits[0]
    finally:
        hook.remove()
    return logits, caught[0][0]


def logits_of(model: Any, output: MultimodalProcessorOutput, embeds: torch.Tensor) -> torch.Tensor:
    assert output.mrope_positions is not None
    positions = torch.from_numpy(output.mrope_positions)[:, None]
    with torch.no_grad():
        logits: torch.Tensor = model(inputs_embeds=embeds[None], position_ids=positions).logits[0]
    return logits


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_logits_equal_transformers(
    prompt: str,
    torch_float: ModelProcessor,
    compact: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
) -> None:
    given = media(prompt, make_image, moving)
    small = {"video_min_pixels": 784} if given["videos"] else {}
    floats, output = (opened.process(prompt, **given, **small) for opened in (torch_float, compact))
    assert np.array_equal(floats.mrope_positions, output.mrope_positions)
    counter = CallCounter(encoder)
    embeds = embed_in_chunks(output, model.get_input_embeddings(), counter.as_mapping(), size=10_000)
    assert sorted(counter.calls) == sorted(len(part) for part in given.values() if part)  # one call a modality
    # Where a video is in it, the model gets our positions: this release numbers text after a video otherwise.
    positions = torch.from_numpy(output.mrope_positions)[:, None] if given["videos"] else None
    expected, rows = reference(model, floats, positions)
    assert torch.allclose(embeds, rows, rtol=0, atol=1e-5)
    found = logits_of(model, output, embeds)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    # The comparison can fail: other rows or other positions are far away.
    assert float(expected.std()) > 0.05
    if output.mm_items:
        without = embeds.clone()
        without[torch.from_numpy(output.token_modalities > 0)] = 0
        assert not torch.allclose(logits_of(model, output, without), expected, rtol=0, atol=1e-2)


def test_messages_interleave_images_and_videos(
    compact: ModelProcessor,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
    video: Callable[..., bytes],
) -> None:
    image, frames = make_image(0, 56, 84), VideoFrames(moving(4), fps=2)
    data = video(24, 24)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    parts = [
        {"type": "video", "video": frames},
        {"type": "text", "text": "and\n\n"},
        {"type": "image", "image": image},
        {"type": "video_url", "video_url": {"url": url}},
    ]
    found = compact.process([{"role": "user", "content": parts}])
    text = compact.checkpoint.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, parts[1], {"type": "image"}, {"type": "video"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = compact.process(text, [image], [frames, data])
    assert [item.modality.name for item in found.mm_items] == ["VIDEO", "IMAGE", "VIDEO"]
    assert [item.identity for item in found.mm_items] == [item.identity for item in expected.mm_items]
    for name in ("input_ids", "padded_input_ids", "mrope_positions", "token_modalities"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    again = compact.process(expected.input_ids, [image], [frames, data], expanded=True)
    assert [item.offsets for item in again.mm_items] == [item.offsets for item in expected.mm_items]


def test_every_chunk_size_gives_the_same_bits_from_one_call_a_modality(
    compact: ModelProcessor,
    encoder: Encoder,
    model: Any,
    make_image: Callable[..., Image.Image],
    moving: Callable[..., np.ndarray],
) -> None:
    prompt = PROMPTS[5]
    output = compact.process(prompt, **media(prompt, make_image, moving), video_min_pixels=784)
    table, cache, counter = model.get_input_embeddings(), EmbeddingCache(1 << 24), CallCounter(encoder)
    whole = embed_in_chunks(output, table, counter.as_mapping(), size=10_000, cache=cache)
    for size in range(1, len(output.input_ids) + 1):
        assert torch.equal(embed_in_chunks(output, table, counter.as_mapping(), size=size, cache=cache), whole), size
    assert sorted(counter.calls) == [1, 3]


# ------------------------------------------------------------------ a model that was run elsewhere


def word_tokenizer(special: dict[str, int]) -> PreTrainedTokenizerFast:
    """256 words, word n has id n; the special tokens have the ids that the model was run with."""
    names = {
        special["vision_start"]: "<|vision_start|>",
        special["vision_end"]: "<|vision_end|>",
        special["image"]: "<|image_pad|>",
        special["video"]: "<|video_pad|>",
        special["eos"]: "<|im_end|>",
        special["pad"]: "<|endoftext|>",
    }
    vocabulary = {names.get(index, f"w{index}"): index for index in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


@pytest.fixture(scope="module")
def golden_folder(golden: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    described = golden("models.json")["tiny"]
    special = described["special_ids"]
    config = Qwen2_5_VLConfig(
        text_config=described["text_config"],
        vision_config=described["vision_config"],
        image_token_id=special["image"],
        video_token_id=special["video"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
        tie_word_embeddings=described["tie_word_embeddings"],
    )
    return make_checkpoint(
        tmp_path_factory.mktemp("golden"), config=config, tokenizer=word_tokenizer(special), seed=20260101
    )


@pytest.fixture(scope="module")
def golden_model(golden_folder: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(golden_folder, dtype=torch.float32).eval()


def test_the_weights_are_those_of_the_written_rule(golden: Callable[[str], Any], golden_model: Any) -> None:
    described = golden("models.json")["tiny"]
    digest = hashlib.sha256()
    state = golden_model.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + b"\0" + state[name].contiguous().numpy().tobytes())
    assert digest.hexdigest() == described["state_dict_sha256"]
    assert sum(parameter.numel() for parameter in golden_model.parameters()) == described["parameters"]


@pytest.mark.parametrize("name", ["two_images", "image_first_last"])
@pytest.mark.parametrize("options", [{"resize": "pillow", "feature_format": "float32"}, {}], ids=["pillow", "compact"])
def test_rows_positions_and_logits_are_those_that_were_written_down(
    golden: Callable[[str], Any],
    name: str,
    options: dict[str, str],
    registry: Registry,
    golden_folder: Path,
    golden_model: Any,
) -> None:
    (case,) = [case for case in golden("models.json")["tiny"]["cases"] if case["id"] == name]
    arrays = {key.partition(".")[2]: value for key, value in golden("tiny.npz").items() if key.startswith(f"{name}.")}
    processor, encoder = registry.load_processor(golden_folder, **options), registry.load_encoder(golden_folder)
    files = [base64.b64decode(image) for image in case["images"]]
    pad, ids = processor.special_tokens.im_token_id, arrays["input_ids"].tolist()
    output = processor.process(
        [token for token, group in itertools.groupby(ids) for _ in _one_of_pads(token, group, pad)], files
    )
    assert output.input_ids.tolist() == ids
    assert [item.image_grid_thw.tolist()[0] for item in output.mm_items] == case["image_grid_thw"]
    if options:
        digests = [hashlib.sha256(item.feature.tobytes()).hexdigest() for item in output.mm_items]
        assert digests == case["pixel_values_sha256"]
    assert output.mrope_positions is not None
    assert output.mrope_positions.tolist() == arrays["position_ids"].tolist()
    assert output.mrope_position_delta == case["rope_delta"]
    embeds = embed_in_chunks(output, golden_model.get_input_embeddings(), encoder, size=33)
    for index, item in enumerate(output.mm_items):
        ((start, end),) = item.offsets
        assert torch.allclose(
            embeds[start : end + 1], torch.from_numpy(arrays[f"vision_embeds.image{index}"]), rtol=0, atol=1e-4
        )
    logits = logits_of(golden_model, output, embeds)
    assert torch.allclose(logits, torch.from_numpy(arrays["logits"]), rtol=0, atol=1e-4)
    assert int(logits[-1].argmax()) == case["greedy_next_8_tokens"][0]


def _one_of_pads(token: int, group: Any, pad: int) -> Sequence[int]:
    """Adjacent equal tokens as they are, placeholders once."""
    found = list(group)
    return found[:1] if token == pad else found


def test_a_video_stored_without_loss_gives_its_own_frames(
    compact: ModelProcessor, moving: Callable[..., np.ndarray]
) -> None:
    """A GIF's levels survive, so that what is seen can be compared with what was written."""
    frames = moving(4) // 64 * 85  # 64 colors
    imgs = [Image.fromarray(frame).quantize(64, dither=Image.Dither.NONE) for frame in frames]
    shown = np.stack([np.asarray(img.convert("RGB")) for img in imgs])
    file = io.BytesIO()
    imgs[0].save(file, "GIF", save_all=True, append_images=imgs[1:], duration=500, optimize=False)
    (item,) = compact.process(VIDEO, videos=[file.getvalue()], video_min_pixels=784).mm_items
    assert item.second_per_grid_ts.tolist() == [1.0]
    found = (
        item.feature.reshape(2, 3, 4, 2, 2, 3, 2, 14, 14).transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(4, 84, 112, 3)
    )
    assert np.array_equal(found, shown)
