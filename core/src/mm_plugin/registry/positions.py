"""What a scheduler asks of a model without a processor: positions, embeddings of an item, token ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from mm_plugin.checkpoint_files import read_vocabulary
from mm_plugin.errors import RequestError, UsageError
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.processor.author import Author
from mm_plugin.processor.opened import special_tokens_of
from mm_plugin.processor.options import OptionTable

if TYPE_CHECKING:
    import numpy as np

    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.processor.model import ModelProcessor
    from mm_plugin.settings import Settings
    from mm_plugin.spec import ModelSpec


class Vocabulary:
    """The ids of a checkpoint's tokens, in place of its tokenizer. Final.

    Args:
        checkpoint: whose files are read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._ids = read_vocabulary(checkpoint.folder)

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
        return dict(self._ids)


def has_tokens(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether the tokenizer's files have every token that a spec names; where not, the plugin's tokenizer adds some."""
    known = read_vocabulary(checkpoint.folder)
    return {*spec.placeholders.values(), *(token for pair in spec.token_pairs for token in pair)} <= known.keys()


@final
class ModelPositions:
    """The rules of one model that need no media input: what a scheduler asks where it has items but no processor.

    Made by `Registry.load_positions`; safe to use from several threads.

    Args:
        cls: the author's class.
        spec: the plugin's declaration.
        checkpoint: the opened checkpoint, whose tokenizer needs `get_vocab` alone.
        settings: limits and switches.
        given: options given at load.
        owner: plugin, distribution and version, for errors.

    Attributes:
        spec: the plugin's declaration.
        config: the checkpoint's config.json.
        special_tokens: ids of placeholders and pairs.
        options: by name, the options given at load, on which positions may depend.
    """

    def __init__(
        self,
        cls: type[ModelProcessor],
        spec: ModelSpec,
        checkpoint: Checkpoint,
        settings: Settings,
        given: Mapping[str, Any],
        owner: Mapping[str, str],
    ) -> None:
        table = OptionTable(getattr(cls, "Options", None), cls.__name__, spec, checkpoint, given, owner)
        self.spec, self.config = spec, checkpoint.config
        self.special_tokens = special_tokens_of(spec, checkpoint)
        self.options: Mapping[str, Any] = table.given_at_load()
        self._author = Author(cls(spec, checkpoint, settings, self.special_tokens, table.loaded), spec, owner)

    def __call__(self, items: Sequence[MultimodalDataItem], *, seq: int) -> tuple[np.ndarray, int] | tuple[None, None]:
        """Positions of an expanded prompt, and what is added to an index after it: those of `Processor.process`.

        Args:
            items: with offsets and model fields; features are not needed.
            seq: length of the expanded prompt, tokens.

        Returns:
            Positions [3, seq] int64 and the delta; None twice for a model with ordinary positions.

        Raises:
            UsageError: an argument is of another kind.
            ProcessorError: the plugin's rule fails, on items that do not fit their spans too.
        """
        if type(seq) is not int or seq < 0:
            raise UsageError(f"seq: expected a number of tokens, got {seq!r}", argument="seq")
        if not all(isinstance(item, MultimodalDataItem) for item in items):
            raise UsageError("items: expected each to be a MultimodalDataItem", argument="items")
        positions, delta = self._author.positions(items, seq, self.options)
        return (None, None) if positions is None or delta is None else (positions, delta)

    def num_embeddings(self, modality: Modality | str, fields: Mapping[str, Any]) -> int:
        """How many embeddings an item with these model fields has.

        Args:
            modality: what it is.
            fields: the model fields, such as `image_grid_thw`; an item's `model_specific_data`.

        Raises:
            RequestError: the model does not take the modality.
            UsageError: a field is missing, or the media inputs of a request are prepared together.
            ProcessorError: the plugin fails on them.
        """
        modality = Modality.parse(modality)
        if modality not in self.spec.modalities:
            raise RequestError(f"{self.spec.name} takes no {modality.argument}", path=modality.argument)
        if self._author.is_joint():
            raise UsageError(
                f"{self.spec.name} prepares the media inputs of a request together, so the embeddings of one are unknown",
                argument="fields",
            )
        missing = [name for name in self.spec.fields[modality] if name not in fields]
        if missing:
            raise UsageError(
                f"fields: expected {', '.join(self.spec.fields[modality])}, {missing[0]} is missing", argument="fields"
            )
        return self._author.replacement(fields, modality.argument).num_embeddings
