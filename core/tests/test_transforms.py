"""Resize, patches and normalization, equal to transformers and torch."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_smart_resize

from mm_plugin import transforms
from mm_plugin.errors import SizeError
from mm_plugin.media import normalize_image, open_image
from mm_plugin.settings import Settings
from mm_plugin.transforms import patches, resizing

DATA = Path(__file__).parent / "data"
RESIZE: dict[str, Any] = json.loads((DATA / "smart_resize.json").read_text())
VIDEO: dict[str, Any] = json.loads((DATA / "video_sampling.json").read_text())
PIXELS: dict[str, Any] = json.loads((DATA / "qwen2vl_pixels.json").read_text())
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def prepare(
    pixels: np.ndarray, rule: transforms.ResizeRule, min_pixels: int, max_pixels: int
) -> tuple[Any, np.ndarray, Any]:
    """The route of an image: (patches of uint8, rows of float32, grid)."""
    height, width = transforms.smart_resize(*pixels.shape[:2], factor=28, min_pixels=min_pixels, max_pixels=max_pixels)
    patches = transforms.patchify(transforms.resize(pixels, height, width, rule=rule), patch_size=14, merge_size=2)
    table = transforms.normalization_table(MEAN, STD, rescale=1 / 255, rule=rule)
    return patches, transforms.normalize_patches(patches, table, temporal_patch_size=2), [1, height // 14, width // 14]


def img(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", "ABCD")
def test_sizes_equal_the_reference(setting: str) -> None:
    rows = [row for row in RESIZE["rows"] if row[0] == setting]
    assert len(rows) == 108
    for _, height, width, expected in rows:
        if expected is None:
            with pytest.raises(SizeError):
                transforms.smart_resize(height, width, factor=28, **RESIZE["settings"][setting])
        else:
            found = transforms.smart_resize(height, width, factor=28, **RESIZE["settings"][setting])
            assert list(found) == expected, (height, width)


@pytest.mark.case("2.8")
@settings(max_examples=400)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([(28, 3136, 1003520), (28, 3136, 12845056), (28, 200704, 401408), (32, 1, 50176), (28, 784, 784)]),
)
def test_sizes_equal_transformers(height: int, width: int, budget: tuple[int, int, int]) -> None:
    factor, least, most = budget
    try:
        expected = reference_smart_resize(height, width, factor, least, most)
    except ValueError:
        with pytest.raises(SizeError, match="ratio"):
            transforms.smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        return
    found = transforms.smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
    assert found == expected


@pytest.mark.case("1.9")
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(0, 10), st.integers(0, 10_000))
def test_no_side_is_shorter_than_the_factor(height: int, width: int, least: int, more: int) -> None:
    if max(height, width) > 200 * min(height, width):
        height = width
    budget = {"min_pixels": 784 * (least + 1), "max_pixels": 784 * (least + 1 + more)}
    new_height, new_width = transforms.smart_resize(height, width, factor=28, **budget)
    assert new_height % 28 == new_width % 28 == 0
    assert min(new_height, new_width) >= 28
    assert new_height * new_width <= budget["max_pixels"] or min(new_height, new_width) == 28 or more < 3 * (least + 1)


@pytest.mark.case("1.10")
def test_a_ratio_of_just_200_is_accepted_and_one_above_is_not() -> None:
    for height, width in ((200, 1), (1, 200), (5, 1000)):
        transforms.smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=1003520)
    for height, width in ((1093, 5), (201, 1), (5, 1001)):
        with pytest.raises(SizeError, match=f"{height} x {width}"):
            transforms.smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=1003520)
    transforms.smart_resize(201, 1, factor=28, min_pixels=3136, max_pixels=1003520, max_ratio=201)


@pytest.mark.case("1.10")
@pytest.mark.parametrize(
    ("height", "width", "expected"), [(26, 28, (56, 84)), (27, 332, (28, 336)), (14, 42, (56, 112))]
)
def test_a_side_below_the_factor_is_raised_to_it(height: int, width: int, expected: tuple[int, int]) -> None:
    # 26 x 28 rounds to 28 x 28, too small, and grows by g = sqrt(3136 / 728): ceil(26 * g / 28) = 2, ceil(28 * g / 28) = 3.
    # 14 x 42: both halves round to even, 0 x 56, so the area grows: ceil(14 * g / 28), ceil(42 * g / 28), g = sqrt(3136 / 588)
    assert transforms.smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=1003520) == expected


@pytest.mark.parametrize(
    ("size", "budget"), [((0, 5), (1, 9)), ((5, 0), (1, 9)), ((-1, 5), (1, 9)), ((5, 5), (9, 8)), ((5, 5), (0, 9))]
)
def test_no_area_and_no_budget_are_refused(size: tuple[int, int], budget: tuple[int, int]) -> None:
    with pytest.raises(SizeError):
        transforms.smart_resize(*size, factor=28, min_pixels=budget[0], max_pixels=budget[1])


# --- the whole route ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PIXELS["images"], ids=lambda case: case["id"])
@pytest.mark.parametrize("rule", ["pillow", "torch"])
def test_images_equal_the_reference_bit_for_bit(case: dict[str, Any], rule: transforms.ResizeRule) -> None:
    data = (DATA / "images" / case["image"]).read_bytes()
    pixels = open_image(data, path="images[0]", settings=Settings()).decode().pixels
    assert sha256(pixels) == case["rgb_sha256"]
    patches, rows, grid = prepare(pixels, rule, case["min_pixels"], case["max_pixels"])
    assert grid == case["grid_thw"]
    assert rows.dtype == np.float32
    assert sha256(rows) == case[f"{rule}_sha256"]
    if rule == "torch":
        assert patches.dtype == np.uint8
        assert sha256(patches) == case["torch_uint8_patches_sha256"]


def test_gray_of_16_bits_is_scaled_not_clipped() -> None:
    image = Image.open(DATA / "images" / "i16_gray_60x60.png")
    levels = np.array(image).astype(np.int64)
    assert levels.max() > 255  # else clipping and scaling would look alike
    pixels = normalize_image(image)
    for channel in range(3):
        by_hand = np.floor(levels / 65535 * 255 + 0.5)
        assert np.abs(pixels[:, :, channel] - by_hand).max() == 0


PROCESSOR = Qwen2VLImageProcessorPil()


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 300), st.integers(8, 300), st.integers(0, 10), st.sampled_from([(3136, 1003520), (20000, 60000)]))
def test_the_pillow_route_equals_transformers(height: int, width: int, seed: int, budget: tuple[int, int]) -> None:
    pixels = img(height, width, seed)
    expected = PROCESSOR(
        images=Image.fromarray(pixels),
        return_tensors="np",
        size={"shortest_edge": budget[0], "longest_edge": budget[1]},
    )
    _, rows, grid = prepare(pixels, "pillow", *budget)
    assert [grid] == expected["image_grid_thw"].tolist()
    assert np.array_equal(rows, expected["pixel_values"])


# --- resize ------------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 120)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(2, 120), st.integers(2, 120), st.integers(0, 9))
def test_the_torch_rule_equals_plain_interpolate(h: int, w: int, new_h: int, new_w: int, seed: int) -> None:
    pixels = img(h, w, seed)
    planar = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    expected = torch.nn.functional.interpolate(
        planar, size=(new_h, new_w), mode="bicubic", antialias=True, align_corners=False
    )
    found = transforms.resize(pixels, new_h, new_w, rule="torch")
    assert found.flags.c_contiguous
    assert np.array_equal(found, expected[0].numpy().transpose(1, 2, 0))


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, sizes, st.integers(0, 9))
def test_the_pillow_rule_equals_pillow(h: int, w: int, new_h: int, new_w: int, seed: int) -> None:
    pixels = img(h, w, seed)
    expected = np.asarray(Image.fromarray(pixels).resize((new_w, new_h), resample=3))
    assert np.array_equal(transforms.resize(pixels, new_h, new_w, rule="pillow"), expected)


@pytest.mark.parametrize("rule", ["pillow", "torch"])
def test_resizing_leaves_its_argument_alone_and_takes_read_only_memory(rule: transforms.ResizeRule) -> None:
    pixels = img(40, 50)
    before = pixels.copy()
    expected = transforms.resize(pixels, 28, 56, rule=rule)
    pixels.flags.writeable = False
    assert np.array_equal(transforms.resize(pixels, 28, 56, rule=rule), expected)
    assert np.array_equal(pixels, before)
    assert transforms.resize(pixels, 40, 50, rule=rule) is pixels


def test_the_two_rules_differ_on_some_image() -> None:
    pixels = img(100, 90)
    assert not np.array_equal(
        transforms.resize(pixels, 56, 56, rule="torch"), transforms.resize(pixels, 56, 56, rule="pillow")
    )


# --- patches -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_patches_equal_a_loop_over_pixels(rows: int, columns: int, patch: int, merge: int) -> None:
    height, width = rows * patch * merge, columns * patch * merge
    pixels = img(height, width)
    expected = [
        [[int(pixels[top + y, left + x, c]) for y in range(patch) for x in range(patch)] for c in range(3)]
        for row in range(rows)
        for column in range(columns)
        for m in range(merge)
        for n in range(merge)
        for top in [(row * merge + m) * patch]
        for left in [(column * merge + n) * patch]
    ]
    found = transforms.patchify(pixels, patch_size=patch, merge_size=merge)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.tolist() == expected


@pytest.mark.parametrize(("height", "width"), [(28, 55), (55, 28), (14, 28), (29, 28)])
def test_an_image_that_is_no_multiple_is_refused(height: int, width: int) -> None:
    with pytest.raises(SizeError, match=f"28 pixels, got {height} x {width}"):
        transforms.patchify(img(height, width), patch_size=14, merge_size=2)


# --- normalization -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["pillow", "torch"])
def test_levels_are_normalized_in_the_arithmetic_of_the_rule(rule: transforms.ResizeRule) -> None:
    table = transforms.normalization_table(MEAN, STD, rescale=1 / 255, rule=rule)
    assert table.dtype == np.float32
    levels = torch.arange(256)
    for channel in range(3):
        mean, std = torch.tensor(MEAN[channel]), torch.tensor(STD[channel])
        if rule == "torch":
            expected = (levels.float() - mean * 255.0) / (std * 255.0)
        else:
            expected = ((levels.double() * (1 / 255)).float() - mean) / std
        assert table[channel].tolist() == expected.tolist()
        exact = [(level / 255 - MEAN[channel]) / STD[channel] for level in range(256)]
        assert np.allclose(table[channel], exact, rtol=0, atol=2e-6)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 3))
def test_rows_repeat_the_frame_inside_each_channel(n_patches: int, area: int, frames: int) -> None:
    patches = np.random.default_rng(0).integers(0, 256, (n_patches, 3, area), dtype=np.uint8)
    table = np.random.default_rng(1).random((3, 256)).astype(np.float32)
    rows = transforms.normalize_patches(patches, table, temporal_patch_size=frames)
    expected = [
        [float(table[c, patches[p, c, i]]) for c in range(3) for _ in range(frames) for i in range(area)]
        for p in range(n_patches)
    ]
    assert rows.shape == (n_patches, 3 * frames * area)
    assert rows.tolist() == expected


# --- videos ------------------------------------------------------------------------------------------------------------


def sample(total: int, rate: float, rule: transforms.FrameRule, **options: Any) -> np.ndarray:
    wanted = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "multiple": 2} | options
    indices = transforms.sample_frames(total, rate, rule=rule, **wanted)
    assert indices.dtype == np.int64
    assert indices[0] >= 0
    assert indices[-1] < total
    return indices


@pytest.mark.case("9.3")
@pytest.mark.case("9.6")
@pytest.mark.parametrize("rule", ["qwen", "transformers"])
@pytest.mark.parametrize("case", VIDEO["frames"], ids=lambda c: f"{c['total']} at {c['rate']} {c['options']}")
def test_the_same_frames_as_the_reference(case: dict[str, Any], rule: transforms.FrameRule) -> None:
    options = {{"nframes": "num_frames"}.get(name, name): value for name, value in case["options"].items()}
    indices = sample(case["total"], case["rate"], rule, **options)
    expected = case[rule]
    if expected is None:  # the reference refuses videos that are too short for what is asked; they give what they have
        wanted = max(2, options.get("num_frames", 4) // 2 * 2)
        assert len(indices) == min(wanted, max(1, case["total"] // 2 * 2))
        return
    assert len(indices) == expected["n"]
    if "all" in expected:
        assert indices.tolist() == expected["all"]
    else:
        assert sha256(indices) == expected["sha256_i64"]
    if rule == "qwen":
        seconds = 2 / (len(indices) / case["total"] * case["rate"])
        assert seconds == pytest.approx(case["second_per_grid_t"], rel=1e-12)


@given(
    st.integers(1, 300_000),
    st.floats(0.1, 240),
    st.sampled_from(["qwen", "transformers"]),
    st.one_of(st.none(), st.integers(1, 1000)),
    st.floats(0.01, 100),
    st.integers(1, 50),
    st.integers(1, 800),
    st.sampled_from([1, 2, 4]),
)
def test_sampled_frames_lie_in_the_video_and_in_the_bounds(
    total: int, rate: float, rule: Any, number: int | None, fps: float, least: int, most: int, multiple: int
) -> None:
    options = {"num_frames": number, "fps": fps, "min_frames": least, "max_frames": most, "multiple": multiple}
    if most < multiple:
        with pytest.raises(SizeError):
            sample(total, rate, rule, **options)
        return
    indices = sample(total, rate, rule, **options)
    assert (np.diff(indices) > 0).all()
    assert len(indices) <= min(most, total)
    if total >= multiple:
        assert len(indices) % multiple == 0
    else:
        assert len(indices) == total


@pytest.mark.parametrize(
    "options",
    [{"fps": 0.0}, {"fps": -1.0}, {"num_frames": 0}, {"min_frames": 0}, {"max_frames": 1}, {"fps": float("nan")}],
)
def test_bounds_that_leave_no_frame_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SizeError):
        sample(100, 25.0, "qwen", **options)
    with pytest.raises(SizeError):
        sample(0, 25.0, "qwen")
    with pytest.raises(SizeError):
        sample(100, 0.0, "qwen")


RELEASED = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}


@pytest.mark.case("9.5")
@pytest.mark.parametrize("rule", ["transformers_default", "transformers_cap_true", "qwen_vl_utils"])
@pytest.mark.parametrize("case", VIDEO["videos"], ids=lambda c: f"{c['frames']} of {c['size']} {c['options']}")
def test_frames_have_the_reference_s_size(case: dict[str, Any], rule: str) -> None:
    if rule not in case:
        pytest.skip("the reference was not asked")
    options = RELEASED | case["options"]
    total = options.pop("total_pixels", int(128_000 * 28 * 28 * 0.9))
    bound = transforms.frame_budget(
        case["frames"], **options, total_pixels=None if rule == "transformers_default" else total, temporal_patch_size=2
    )
    if case[rule] is None:
        if options["max_pixels"] < options["min_pixels"]:
            return  # a budget without a size is refused by the options of whoever asks
        with pytest.raises(SizeError):
            transforms.smart_resize(*case["size"], factor=28, min_pixels=options["min_pixels"], max_pixels=bound)
        return
    size = transforms.smart_resize(*case["size"], factor=28, min_pixels=options["min_pixels"], max_pixels=bound)
    assert list(size) == case[rule]


# --- tiles -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    box=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    seed=st.integers(0, 99),
)
def test_a_letterbox_equals_pillows(size: tuple[int, int], box: tuple[int, int], seed: int) -> None:
    pixels = img(*size, seed)
    expected = ImageOps.pad(Image.fromarray(pixels), box[::-1], color=(127, 5, 250))
    (found,) = transforms.letterbox(pixels, [box], color=(127, 5, 250), rule="pillow")
    assert np.array_equal(found, np.asarray(expected))


def test_several_boxes_are_each_their_own_and_one_may_be_the_image() -> None:
    pixels = img(60, 90)
    boxes = [(60, 90), (30, 30), (1, 400), (60, 90), (120, 60)]
    found = transforms.letterbox(pixels, boxes, color=(1, 2, 3), rule="pillow")
    assert [array.shape[:2] for array in found] == boxes
    assert np.array_equal(found[0], pixels)
    for box, array in zip(boxes, found, strict=True):
        assert np.array_equal(array, np.asarray(ImageOps.pad(Image.fromarray(pixels), box[::-1], color=(1, 2, 3))))


@pytest.mark.parametrize("rule", ["torch", "pillow"])
def test_boxes_of_a_large_image_are_made_side_by_side(rule: transforms.ResizeRule) -> None:
    pixels = img(900, 1200)
    boxes = [(90, 120), (200, 300), (900, 1200), (45, 60)]
    seen: list[int] = []
    thread = threading.get_ident

    class Watched(ThreadPoolExecutor):
        def submit(self, call: Any, /, *arguments: Any, **named: Any) -> Any:
            return super().submit(lambda: (seen.append(thread()), call(*arguments, **named))[1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resizing, "ThreadPoolExecutor", Watched)
        together = transforms.letterbox(pixels, boxes, color=(1, 2, 3), rule=rule)
    assert len(seen) == 3
    assert thread() not in seen
    for box, found in zip(boxes, together, strict=True):
        (alone,) = transforms.letterbox(pixels, [box], color=(1, 2, 3), rule=rule)
        assert np.array_equal(found, alone)


def test_an_image_of_which_nothing_is_left_leaves_an_empty_box() -> None:
    assert transforms.contained_size(1000, 1, box_height=384, box_width=384) == (384, 0)
    (found,) = transforms.letterbox(img(1000, 1), [(384, 384)], color=(1, 2, 3), rule="torch")
    assert (found == (1, 2, 3)).all()
    assert found.shape == (384, 384, 3)


def test_the_two_rules_fill_a_box_within_two_levels() -> None:
    (pillow,), (other,) = (
        transforms.letterbox(img(211, 400), [(100, 100)], color=(127, 127, 127), rule=rule)
        for rule in ("pillow", "torch")
    )
    apart = np.abs(pillow.astype(int) - other).max()
    assert 0 < apart <= 2


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((200, 300), (384, 384)),  # kept whole by all: the smallest
        ((400, 800), (384, 768)),  # 384 x 384 keeps 192 x 384 pixels, both others 384 x 768: the smaller of them
        ((800, 400), (768, 768)),  # no candidate is upright
        ((768, 769), (768, 768)),
        ((1, 100_000), (384, 384)),  # nothing is kept by any
    ],
)
def test_the_resolution_that_keeps_most_is_chosen(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert transforms.best_resolution(*size, [(384, 384), (384, 768), (768, 768)]) == expected


def test_of_equal_resolutions_the_first_is_chosen() -> None:
    flat, upright = (100, 300), (300, 100)
    assert transforms.best_resolution(90, 90, [flat, upright]) == flat
    assert transforms.best_resolution(90, 90, [upright, flat]) == upright


def test_tiles_lie_row_by_row() -> None:
    pixels = img(40, 60)
    tiles = np.empty((6, 20, 20, 3), dtype=np.uint8)
    transforms.cut_tiles(pixels, tiles)
    for index in range(6):
        top, left = index // 3 * 20, index % 3 * 20
        assert np.array_equal(tiles[index], pixels[top : top + 20, left : left + 20])
    for wrong in (img(40, 61), img(41, 60), img(20, 60)):
        with pytest.raises(SizeError, match="6 tiles of 20"):
            transforms.cut_tiles(wrong, tiles)


@given(
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from(["torch", "pillow"]),
)
def test_patches_of_a_video_are_those_of_its_images(
    count: int, down: int, across: int, temporal: int, merge: int, rule: Any
) -> None:
    side = 6
    height, width = down * side * merge, across * side * merge
    frames = [img(17, 23, seed) for seed in range(count)]
    sizes = {"patch_size": side, "merge_size": merge}
    found = transforms.patchify_frames(
        (frame for frame in frames), count, height, width, temporal_patch_size=temporal, rule=rule, **sizes
    )
    steps = -(-count // temporal)
    assert found.shape == (steps * (height // side) * (width // side), 3, temporal * side * side)
    split = found.reshape(steps, -1, 3, temporal, side * side)
    for place in range(steps * temporal):
        resized = transforms.resize(frames[min(place, count - 1)], height, width, rule=rule)
        assert np.array_equal(split[place // temporal, :, :, place % temporal], transforms.patchify(resized, **sizes))


def test_a_frame_that_comes_twice_is_resized_once_and_none_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = patches._planar
    monkeypatch.setattr(patches, "_planar", lambda *args: calls.append(args) or own(*args))
    frame = img(12, 12)
    frame.flags.writeable = False  # as a view of a PIL image is
    before = frame.copy()
    transforms.patchify_frames(
        [frame, frame, img(12, 12, 1)], 3, 12, 12, patch_size=6, merge_size=1, temporal_patch_size=2
    )
    assert len(calls) == 2
    assert np.array_equal(frame, before)


@pytest.mark.parametrize(("frames", "count", "height"), [(2, 3, 12), (0, 1, 12), (3, 2, 12), (2, 2, 13), (2, 2, 18)])
def test_a_video_that_is_not_what_was_promised_is_refused(frames: int, count: int, height: int) -> None:
    video = [img(12, 12, seed) for seed in range(frames)]
    with pytest.raises(SizeError):
        transforms.patchify_frames(video, count, height, 12, patch_size=6, merge_size=2, temporal_patch_size=2)
