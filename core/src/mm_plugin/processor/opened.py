"""What is fixed when a model opens: the author's object, options, tokens, prompt reader, and what the registry lends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import UsageError
from mm_plugin.events import ItemKeyed, MediaNote
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import frame
from mm_plugin.inputs.processed import SpecialTokens
from mm_plugin.items import Modality, MultimodalDataItem, join_notes
from mm_plugin.placeholders import Replacement
from mm_plugin.processor.author import Author
from mm_plugin.processor.budget import Budget
from mm_plugin.processor.caller_hashes import CallerHashes
from mm_plugin.processor.item_options import ItemOptions
from mm_plugin.processor.mixins import Fields
from mm_plugin.processor.options import OptionTable
from mm_plugin.prompt.reader import PromptReader
from mm_plugin.sentinels import check_vocabulary
from mm_plugin.tokenizer_files import find_chat_templates

if TYPE_CHECKING:
    from mm_plugin.checkpoint import Checkpoint
    from mm_plugin.processor.model import ModelProcessor
    from mm_plugin.runtime import Runtime
    from mm_plugin.spec import ModelSpec
    from mm_plugin.tasks import ModelRef


class OpenModel:
    """Everything that the stages read and nothing that a request changes. Final.

    Args:
        cls: the author's class.
        spec: the model's declaration.
        checkpoint: the opened checkpoint.
        runtime: what the registry lends.
        options: options given at load.
        owner: plugin, distribution and version, for errors.
        ref: names this model to workers.
    """

    def __init__(
        self,
        cls: type[ModelProcessor],
        spec: ModelSpec,
        checkpoint: Checkpoint,
        runtime: Runtime,
        options: Mapping[str, Any],
        owner: Mapping[str, str],
        ref: ModelRef,
    ) -> None:
        self.spec, self.runtime, self.settings, self.ref = spec, runtime, runtime.settings, ref
        self.table = OptionTable(getattr(cls, "Options", None), cls.__name__, spec, checkpoint, options, owner)
        self.item_options = ItemOptions(cls.Options, cls.__name__, spec, self.table.scopes, owner)
        self.position_options = self.table.given_at_load()
        self.special_tokens = special_tokens_of(spec, checkpoint)
        known = max(checkpoint.tokenizer.get_vocab().values(), default=-1) + 1
        vocabulary = max(known, _vocabulary_size(checkpoint.config))
        check_vocabulary(vocabulary)
        placeholders = self.special_tokens.placeholders
        self.reader = PromptReader(
            checkpoint.tokenizer,
            placeholders,
            vocabulary=vocabulary,
            placeholder_affixes=spec.placeholder_affixes,
            templates=_chat_templates(checkpoint),
            add_special_tokens=spec.add_special_tokens,
            settings=runtime.settings,
        )
        # Fields and replacements depend on these too, and all models of a registry keep their items in one cache.
        parts = [
            dict(checkpoint.config),
            {int(m): token for m, token in placeholders.items()},
            self.special_tokens.pairs,
        ]
        self.digest = digest(frame(parts))
        self.budget = Budget(runtime.settings)
        model = cls(spec, checkpoint, runtime.settings, self.special_tokens, self.table.loaded)
        self.author = Author(model, spec, owner)
        self.hashes = CallerHashes(
            spec.name, spec.output_version, self.digest, runtime.caller_hashes, runtime.observers
        )

    def serves(self, modality: Modality) -> Modality:
        """The modality, if the model takes it.

        Raises:
            RequestError: it does not.
        """
        self.budget.check_served(self.spec, modality)
        return modality

    def measure(
        self, modality: Modality, size: Any, options: Any, context: Any, path: str
    ) -> tuple[Fields, Replacement, tuple[str, ...]]:
        """Fields and replacement of a media input of one size, within `max_item_tokens`, and the author's notes on it."""
        fields, notes = self.author.layout(modality, size, options, context, path)
        return fields, self.replacement(fields, path), join_notes(getattr(size, "notes", ()), notes)

    def replacement(self, fields: Fields, path: str) -> Replacement:
        """The tokens that stand for an item, within `max_item_tokens`."""
        replacement = self.author.replacement(fields, path)
        self.budget.check_item_tokens(len(replacement.ids), path)
        return replacement

    def report(self, item: MultimodalDataItem, path: str, *, cached: bool, seconds: float) -> None:
        """Emit that an item has its identity."""
        known = item.identity.hex() if item.identity is not None else f"{item.hash:016x}"
        self.runtime.observers.emit(
            ItemKeyed(
                plugin=self.spec.name,
                path=path,
                modality=item.modality.name.lower(),
                identity=known,
                num_tokens=item.num_tokens,
                cached=cached,
                elapsed_ms=round(seconds * 1e3, 3),
            )
        )

    def report_notes(self, modality: Modality, path: str, notes: Sequence[str]) -> None:
        """Emit what was served otherwise than asked."""
        for note in notes:
            self.runtime.observers.emit(MediaNote(path=path, modality=modality.name.lower(), note=note))


def special_tokens_of(spec: ModelSpec, checkpoint: Checkpoint) -> SpecialTokens:
    """The ids of a model's placeholders and pairs.

    Raises:
        UsageError: the checkpoint's tokenizer lacks one of them.
    """
    vocabulary = checkpoint.tokenizer.get_vocab()

    def token_id(token: str) -> int:
        if token not in vocabulary:
            raise UsageError(
                f"the checkpoint's tokenizer has no token {token!r}, which {spec.name} needs", argument="checkpoint"
            )
        return int(vocabulary[token])

    return SpecialTokens(
        placeholders={modality: token_id(token) for modality, token in spec.placeholders.items()},
        pairs=tuple((token_id(start), token_id(end)) for start, end in spec.token_pairs),
    )


def _chat_templates(checkpoint: Checkpoint) -> Mapping[str, str] | UsageError:
    """The chat templates, or why they cannot be read: prompts of text and ids need none."""
    try:
        return find_chat_templates(checkpoint.folder, checkpoint.tokenizer)
    except UsageError as error:
        return error


def _vocabulary_size(config: Any) -> int:
    """Rows of the largest embedding table that a config names, padding included, however deep it stands."""
    if isinstance(config, list | tuple):
        return max(map(_vocabulary_size, config), default=0)
    if not isinstance(config, Mapping):
        return 0
    own = [config.get(name) for name in ("vocab_size", "padded_vocab_size")]
    return max([0, *(size for size in own if isinstance(size, int)), *map(_vocabulary_size, config.values())])
