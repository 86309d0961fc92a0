"""Model-neutral numerics over pictures and clips: resized sizes, the two resize rules, sampled frames, patch grids, normalisation.

Every number is an argument. Knows no model and no file format. Pictures and frames are numpy [height, width, 3] uint8 RGB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from PIL import Image

from mm_plugin.errors import SizeError

ResizeRule = Literal["torch", "pillow"]
FrameRule = Literal["qwen", "transformers"]
MAX_ASPECT_RATIO = 200
# Patches that are normalised together; measured: 1,024 take three quarters of the time of all at once.
_BLOCK = 1024
# Levels from which on a thread for each further size of a picture pays: it costs 0.1 ms, resizing a megapixel 10 ms.
_WORTH_A_THREAD = 3_000_000


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, max_ratio: float = MAX_ASPECT_RATIO
) -> tuple[int, int]:
    """The size to which a picture is resized so that both sides are multiples of `factor` and the area is within a budget.

    The ratio of the sides is kept as nearly as the multiples allow. A side is never shorter than `factor`, so the area of a
    very thin picture may pass `max_pixels`, as it does in the reference.

    Args:
        height: pixels.
        width: pixels.
        factor: pixels; patch size times merge size.
        min_pixels: smallest area, pixels.
        max_pixels: largest area, pixels.
        max_ratio: longer side over shorter side that is still accepted.

    Returns:
        (height, width), pixels.

    Raises:
        SizeError: a side is not positive, the ratio is over `max_ratio`, or the budget is empty.

    Source: transformers@5.24 Qwen2VLImageProcessor; numbers of the released Qwen2-VL training code, where they agree.
    """
    if height < 1 or width < 1:
        raise SizeError(f"a picture of {height} x {width} pixels (height x width) has no area")
    if not 1 <= min_pixels <= max_pixels:
        raise SizeError(f"the pixel budget from {min_pixels} to {max_pixels} is empty")
    ratio = max(height, width) / min(height, width)
    if ratio > max_ratio:
        raise SizeError(
            f"{height} x {width} pixels (height x width) is a ratio of {ratio:.1f}, at most {max_ratio} is accepted"
        )
    # Python's round (half to even) is part of the rule: 14 and 42 pixels at factor 28 round to 0 and 56.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    area = height * width
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    # A side that rounded to nothing makes the area 0, which is below every budget, so it has grown again.
    return new_height, new_width


def resize(pixels: np.ndarray, height: int, width: int, *, rule: ResizeRule) -> np.ndarray:
    """Bicubic resize with antialiasing on uint8, by one of two named rules.

    `torch` equals transformers' torchvision backend on the CPU; `pillow` equals its Pillow backend and the released training
    code. They differ by a level or two. A picture that has the size already is returned as it is, by both rules.

    Args:
        pixels: [height, width, 3] uint8.
        height: new height, pixels.
        width: new width, pixels.
        rule: `torch` or `pillow`.

    Shape:
        returns [height, width, 3] uint8, contiguous.
    """
    return _resize_all(pixels, [(height, width)], rule)[0]


def _resize_all(pixels: np.ndarray, sizes: Sequence[tuple[int, int]], rule: ResizeRule) -> list[np.ndarray]:
    """A picture resized to each of several sizes; it is brought into Pillow's or torch's form once."""
    if all(pixels.shape[:2] == size for size in sizes):
        return [pixels] * len(sizes)
    make = _pillow_resizer(pixels) if rule == "pillow" else _torch_resizer(pixels)

    def make_one(size: tuple[int, int]) -> np.ndarray:
        return pixels if pixels.shape[:2] == size else make(size)

    first, *others = sizes
    if not others or pixels.size < _WORTH_A_THREAD:
        return [make_one(size) for size in sizes]
    # Both libraries use one core for one picture, and let other threads run. Resizing in bands would not be exact.
    with ThreadPoolExecutor(len(others)) as pool:
        futures = [pool.submit(make_one, size) for size in others]
        return [make_one(first), *(future.result() for future in futures)]


def _pillow_resizer(pixels: np.ndarray) -> Callable[[tuple[int, int]], np.ndarray]:
    image = Image.fromarray(pixels)
    return lambda size: np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))


def _torch_resizer(pixels: np.ndarray) -> Callable[[tuple[int, int]], np.ndarray]:
    interpolate = _interpolator(pixels)
    # torch puts the channels last in half the time that numpy takes.
    return lambda size: interpolate(size).permute(1, 2, 0).contiguous().numpy()  # [height, width, 3]


def _interpolator(pixels: np.ndarray) -> Callable[[tuple[int, int]], Any]:
    """The `torch` rule: from [height, width, 3] uint8 a tensor [3, height, width] of another size, in whatever memory order."""
    import torch

    # A channels-last view of the picture as it lies is three times faster than a planar copy, and equal bit for bit.
    # torch takes no memory that cannot be written, such as a view of a PIL image.
    writable = pixels if pixels.flags.writeable else pixels.copy()
    source = torch.from_numpy(writable).permute(2, 0, 1).unsqueeze(0)  # [1, 3, height, width]
    return lambda size: torch.nn.functional.interpolate(source, size=size, mode="bicubic", antialias=True)[0]


def best_resolution(height: int, width: int, candidates: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The candidate that keeps most of a picture's pixels, and of those that keep equally many the smallest.

    What a candidate keeps is the area of the picture fitted into it, at most the picture's own. The first of equals wins, so
    the order of the candidates counts.

    Args:
        height: pixels.
        width: pixels.
        candidates: (height, width), pixels.

    Returns:
        (height, width), pixels: one of the candidates. Of a picture so thin that none keeps any of it, the smallest.

    Source: LLaVA-NeXT's any-resolution rule, with the rounding of the released DeepSeek-VL2 code.
    """

    def rank(candidate: tuple[int, int]) -> tuple[int, int]:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -candidate[0] * candidate[1]

    return max(candidates, key=rank)  # the first of equals


def contained_size(height: int, width: int, *, box_height: int, box_width: int) -> tuple[int, int]:
    """The largest size within a box that keeps the ratio of the sides, as `PIL.ImageOps.contain` rounds it.

    Args:
        height: of the picture, pixels.
        width: of the picture, pixels.
        box_height: pixels.
        box_width: pixels.

    Returns:
        (height, width), pixels; one of them is the box's own, the other is 0 where the picture is so thin that nothing is left.
    """
    ratio, box_ratio = width / height, box_width / box_height
    if ratio > box_ratio:
        return round(height / width * box_width), box_width
    if ratio < box_ratio:
        return box_height, round(width / height * box_height)
    return box_height, box_width


def letterbox(
    pixels: np.ndarray, sizes: Sequence[tuple[int, int]], *, color: tuple[int, int, int], rule: ResizeRule
) -> list[np.ndarray]:
    """A picture resized into each of several boxes, centred, the rest of a box in one colour.

    Under the rule `pillow` it equals `PIL.ImageOps.pad` with the bicubic filter, bit for bit. A picture so thin that nothing of it
    is left in a box leaves that box empty, as it does there.

    Args:
        pixels: [height, width, 3] uint8.
        sizes: (height, width) of each box, pixels.
        color: RGB levels.
        rule: see `resize`.

    Shape:
        returns for each size [height, width, 3] uint8; it may be `pixels` itself where that has the size already.
    """
    height, width = pixels.shape[:2]
    inner = [contained_size(height, width, box_height=box[0], box_width=box[1]) for box in sizes]
    visible = _resize_all(pixels, [size for size in inner if all(size)], rule)
    boxes: list[np.ndarray] = []
    for box, size in zip(sizes, inner, strict=True):
        if size == box:
            boxes.append(visible.pop(0))
            continue
        out = np.empty((*box, 3), dtype=np.uint8)
        out[...] = color
        # Python's round, half to even, of half of what is left over.
        top, left = (round((side - part) * 0.5) for side, part in zip(box, size, strict=True))
        if all(size):
            out[top : top + size[0], left : left + size[1]] = visible.pop(0)
        boxes.append(out)
    return boxes


def cut_tiles(pixels: np.ndarray, out: np.ndarray) -> None:
    """Cut a picture into square tiles, row by row.

    Args:
        pixels: [height, width, 3] uint8; both sides multiples of a tile's.
        out: [n_tiles, side, side, 3] uint8, written; as many tiles as the picture has.

    Raises:
        SizeError: the picture is not made of so many tiles.
    """
    side = out.shape[1]
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    if pixels.shape[:2] != (rows * side, columns * side) or len(out) != rows * columns:
        raise SizeError(
            f"{pixels.shape[0]} x {pixels.shape[1]} pixels (height x width) is not {len(out)} tiles of {side} pixels"
        )
    cut = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    out.reshape(rows, columns, side, side, 3)[...] = cut


def patchify(pixels: np.ndarray, *, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut a picture into square patches, those that are merged into one token next to one another.

    Args:
        pixels: [height, width, 3] uint8; both sides multiples of patch_size * merge_size.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.

    Shape:
        returns [n_patches, 3, patch_size * patch_size] uint8; patches in the order merged row, merged column, row, column.

    Raises:
        SizeError: a side is no multiple.
    """
    height, width = pixels.shape[:2]
    block = patch_size * merge_size
    if height % block or width % block:
        raise SizeError(f"{height} x {width} pixels (height x width) is no multiple of {block}")
    cut = pixels.reshape(
        height // block, merge_size, patch_size, width // block, merge_size, patch_size, 3
    )  # [rows, m, p, columns, m, p, 3]
    n_patches = (height // patch_size) * (width // patch_size)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(n_patches, 3, patch_size * patch_size)


def patchify_frames(
    frames: Iterable[np.ndarray],
    count: int,
    height: int,
    width: int,
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    rule: ResizeRule = "torch",
) -> np.ndarray:
    """Resize the frames of a clip and cut them into patches of several frames each, one frame in memory at a time.

    The last frame is repeated where the clip has no multiple of `temporal_patch_size`.

    Args:
        frames: `count` pictures [height, width, 3] uint8, of any one size.
        count: frames.
        height: to which they are resized, pixels; a multiple of patch_size * merge_size.
        width: to which they are resized, pixels; a multiple of patch_size * merge_size.
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of a merged token.
        temporal_patch_size: frames in a patch.
        rule: by which frames are resized.

    Shape:
        returns [n_patches, 3, temporal_patch_size * patch_size * patch_size] uint8, nested channel, frame, pixel; patches in the
        order time, merged row, merged column, row, column.

    Raises:
        SizeError: there are not `count` frames, or a side is no multiple.
    """
    block, steps = patch_size * merge_size, -(-count // temporal_patch_size)
    if height % block or width % block:
        raise SizeError(f"{height} x {width} pixels (height x width) is no multiple of {block}")
    down, across = height // block, width // block
    out = np.empty(
        (steps, down, across, merge_size, merge_size, 3, temporal_patch_size, patch_size, patch_size), dtype=np.uint8
    )
    done = 0
    last: np.ndarray | None = None
    cut = np.empty(0, dtype=np.uint8)
    for frame in frames:
        if done == count:
            raise SizeError(f"more frames than the {count} that were promised")
        if frame is not last:
            # Channel after channel first: the pixels of a patch's row then lie together, and are copied once, to their place.
            planar = _planar(frame, height, width, rule)
            cut = planar.reshape(3, down, merge_size, patch_size, across, merge_size, patch_size)
            cut, last = cut.transpose(1, 4, 2, 5, 0, 3, 6), frame
        out[done // temporal_patch_size, :, :, :, :, :, done % temporal_patch_size] = cut
        done += 1
    if done < count or last is None:
        raise SizeError(f"{done} frames, {count} were promised")
    for place in range(done, steps * temporal_patch_size):
        out[place // temporal_patch_size, :, :, :, :, :, place % temporal_patch_size] = cut
    return out.reshape(-1, 3, temporal_patch_size * patch_size**2)


def _planar(pixels: np.ndarray, height: int, width: int, rule: ResizeRule) -> np.ndarray:
    """A resized picture as [3, height, width]."""
    if rule == "torch" and pixels.shape[:2] != (height, width):
        planar: np.ndarray = _interpolator(pixels)((height, width)).contiguous().numpy()
        return planar
    return np.ascontiguousarray(resize(pixels, height, width, rule=rule).transpose(2, 0, 1))


def normalisation_table(mean: Sequence[float], std: Sequence[float], *, rescale: float, rule: ResizeRule) -> np.ndarray:
    """What each of the 256 levels becomes, per channel, in the reference's own float32 arithmetic.

    `torch`: (x - mean / rescale) / (std / rescale), all in float32. `pillow`: x * rescale in float64 rounded to float32, then
    minus mean, then divided by std, in float32. They differ in the last bits.

    Args:
        mean: per channel, of pixels scaled to 0..1.
        std: per channel, of pixels scaled to 0..1.
        rescale: factor that scales a level to 0..1, such as 1/255.
        rule: whose arithmetic.

    Shape:
        returns [3, 256] float32.

    Source: transformers@5.24, the fused normalisation of its torchvision backend, and its Pillow backend.
    """
    one = np.float32
    mean32, std32 = np.asarray(mean, dtype=one)[:, None], np.asarray(std, dtype=one)[:, None]
    levels = np.arange(256)
    table: np.ndarray
    if rule == "torch":
        scale = one(1.0 / rescale)
        table = (levels.astype(one)[None, :] - mean32 * scale) / (std32 * scale)
        return table
    scaled = (levels.astype(np.float64) * rescale).astype(one)
    table = (scaled[None, :] - mean32) / std32
    return table


def normalise_patches(patches: np.ndarray, table: np.ndarray, *, temporal_patch_size: int) -> np.ndarray:
    """Patches as the float rows of a video encoder, each repeated along time.

    Args:
        patches: [n_patches, 3, patch_area] uint8; of several frames they are [n_patches, 3, frames * patch_area].
        table: [3, 256] float32 from `normalisation_table`.
        temporal_patch_size: how often a patch is repeated: frames in a patch for those of a picture, 1 for those of frames.

    Shape:
        returns [n_patches, 3 * temporal_patch_size * patch_area] float32, nested channel, frame, pixel.
    """
    n_patches, channels, area = patches.shape
    out = np.empty((n_patches, channels, temporal_patch_size, area), dtype=np.float32)
    # A block is small enough to be copied to the other frames while it is still in the processor's cache.
    for start in range(0, n_patches, _BLOCK):
        block = slice(start, start + _BLOCK)
        for channel in range(channels):
            # take with mode="clip" skips the bounds check, which an uint8 index cannot fail.
            levels = table[channel].take(patches[block, channel], mode="clip")  # [block, area]
            for frame in range(temporal_patch_size):
                out[block, channel, frame] = levels
    return out.reshape(n_patches, channels * temporal_patch_size * area)


def grid_rows(grid: np.ndarray, *, name: str, merge_size: int, still: bool) -> int:
    """How many merged tokens a grid of patches stands for, if it is one.

    Args:
        grid: what should be [1, 3] int64: frames or temporal patches, rows and columns, in patches.
        name: of the field, for messages.
        merge_size: patches along a side of a merged token.
        still: whether it is a picture's, which has one frame.

    Raises:
        SizeError: another shape, no area, or no whole merged tokens.
    """
    if grid.shape != (1, 3) or grid.dtype != np.int64:
        raise SizeError(f"{name} must be [1, 3] whole numbers, got {list(grid.shape)} {grid.dtype}")
    frames, rows, columns = grid[0].tolist()
    if min(frames, rows, columns) < 1 or (still and frames != 1) or rows % merge_size or columns % merge_size:
        kind = "image" if still else "video"
        raise SizeError(
            f"{name} {frames} x {rows} x {columns} is no {kind} of whole {merge_size} x {merge_size} blocks"
        )
    return int(frames * rows * columns // merge_size**2)


def check_patches(
    feature: Any, grid: np.ndarray, *, name: str, patch_size: int, temporal_patch_size: int, still: bool
) -> None:
    """Refuse a feature that is not the patches of a grid.

    Args:
        feature: numpy or torch; what should be [n_patches, 3 * temporal_patch_size * patch_area] floating point, or compact:
            [n_patches, 3, patch_area] uint8 of a picture, [n_patches, 3, temporal_patch_size * patch_area] uint8 of a clip.
        grid: [1, 3] int64, in patches.
        name: of the feature, for messages.
        patch_size: pixels along a side of a patch.
        temporal_patch_size: frames in a patch.
        still: whether it is a picture's.

    Raises:
        SizeError: another shape or dtype.
    """
    n_patches, area, dtype = int(grid.prod()), patch_size**2, str(feature.dtype)
    compact = dtype.endswith("uint8")
    frames = 1 if compact and still else temporal_patch_size
    shape = (n_patches, 3, frames * area) if compact else (n_patches, 3 * frames * area)
    if tuple(feature.shape) != shape or not (compact or "float" in dtype):
        raise SizeError(f"{name} are {list(feature.shape)} {dtype}, the grid stands for {list(shape)}")


def sample_frames(
    total: int,
    rate: float,
    *,
    fps: float,
    num_frames: int | None = None,
    min_frames: int,
    max_frames: int,
    multiple: int,
    rule: FrameRule = "qwen",
) -> np.ndarray:
    """Which frames of a clip are looked at: so many that a second has `fps` of them, or `num_frames`, spread over the clip.

    The count is a multiple of `multiple`, at least `min_frames` and at most `max_frames`, which wins; `num_frames` stands above
    `min_frames`. A clip never gives more frames than it has, and one that is shorter than `multiple` gives all of them.

    Args:
        total: frames in the clip.
        rate: frames per second in the clip.
        fps: frames per second that are wanted; not read where `num_frames` is given.
        num_frames: frames that are wanted.
        min_frames: fewest frames; rounded up to the multiple.
        max_frames: most frames; rounded down to the multiple.
        multiple: frames in a temporal patch.
        rule: `qwen` spreads them from the first frame to the last, as the released models were trained; `transformers` begins
            each of equal parts of the clip with one.

    Shape:
        returns [n] int64, ascending.

    Raises:
        SizeError: a number is not positive, or the bounds leave no count.

    Source: qwen-vl-utils@0.0.14, its smart_nframes and spacing; transformers@5.24, Qwen2VLVideoProcessor.sample_frames.
    """
    least, most = math.ceil(min_frames / multiple) * multiple, max_frames // multiple * multiple
    if total < 1 or not rate > 0 or not fps > 0 or (num_frames is not None and num_frames < 1):
        raise SizeError(
            f"{total} frames at {rate} per second cannot be sampled at {fps} per second, or by {num_frames}"
        )
    if min_frames < 1 or most < 1:
        raise SizeError(f"from {min_frames} to {max_frames} frames there is no multiple of {multiple}")
    if total < multiple:
        return np.arange(total, dtype=np.int64)
    most = min(most, total // multiple * multiple)
    if num_frames is None:
        count = math.floor(min(max(total / rate * fps, least), most, total) / multiple) * multiple
    else:
        count = min(max(round(num_frames / multiple) * multiple, multiple), most)
    import torch

    # Torch's own spacing is part of both rules: its float32 decides which frame is nearest in a long clip.
    if rule == "transformers":
        spaced = torch.arange(0, total, total / count)[:count]  # rounding can make one too many
    else:
        spaced = torch.linspace(0, total - 1, count).round()
    indices: np.ndarray = spaced.long().numpy()
    return indices


def frame_budget(
    frames: int, *, min_pixels: int, max_pixels: int, total_pixels: int | None, temporal_patch_size: int
) -> int:
    """Most pixels of one frame, where a whole clip has a budget too: an even share of it, but always above the smallest frame.

    Args:
        frames: in the clip, after sampling.
        min_pixels: of one frame.
        max_pixels: of one frame.
        total_pixels: of all temporal patches; no budget where None.
        temporal_patch_size: frames in a temporal patch, which count as one.

    Returns:
        Pixels.

    Source: qwen-vl-utils@0.0.14, fetch_video; transformers@5.24, Qwen2VLVideoProcessor with `cap_pixels_per_frame`.
    """
    if total_pixels is None:
        return max_pixels
    return max(min(max_pixels, total_pixels * temporal_patch_size // frames), int(min_pixels * 1.05))


def retained_video_tokens(grid: tuple[int, int, int], rate: float) -> int:
    """How many tokens of a video are kept when a share of them is pruned: at least one frame's, whatever the rate.

    A function of numbers that the host knows, so that a span has its length before any frame is encoded.

    Args:
        grid: merged tokens along (t, h, w).
        rate: share that is pruned, from 0 to 1 exclusive.

    Raises:
        SizeError: the rate is outside of that, or a side is not positive.

    Source: Efficient Video Sampling, arXiv:2510.14624; the rounding of vLLM@0.33.
    """
    t, h, w = grid
    if not 0 <= rate < 1 or min(grid) < 1:
        raise SizeError(f"a video of {t} x {h} x {w} tokens cannot be pruned by {rate}")
    return max(h * w, int(t * h * w * (1 - rate)))
