from .checkpoints import byte_level_tokenizer, fill_weights, write_json, write_tensors, write_transformers_checkpoint
from .embedding import CallCounter, chunks, embed_in_chunks
from .options import OptionTrial, sweep_options
from .patch_grid import PatchGridCheckpoints
from .provenance import sweep_provenance

__all__ = [
    "CallCounter",
    "OptionTrial",
    "PatchGridCheckpoints",
    "byte_level_tokenizer",
    "chunks",
    "embed_in_chunks",
    "fill_weights",
    "sweep_options",
    "sweep_provenance",
    "write_json",
    "write_tensors",
    "write_transformers_checkpoint",
]
