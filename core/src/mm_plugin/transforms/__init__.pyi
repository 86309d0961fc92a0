from .frames import FrameRule, frame_budget, frame_range, retained_video_tokens, sample_frames
from .normalizing import normalization_table, normalize_patches
from .patches import check_patches, grid_rows, patchify, patchify_frames
from .resizing import MAX_ASPECT_RATIO, ResizeRule, resize, smart_resize
from .tiling import best_resolution, contained_size, cut_tiles, letterbox

__all__ = [
    "MAX_ASPECT_RATIO",
    "FrameRule",
    "ResizeRule",
    "best_resolution",
    "check_patches",
    "contained_size",
    "cut_tiles",
    "frame_budget",
    "frame_range",
    "grid_rows",
    "letterbox",
    "normalization_table",
    "normalize_patches",
    "patchify",
    "patchify_frames",
    "resize",
    "retained_video_tokens",
    "sample_frames",
    "smart_resize",
]
