"""The whole corpus fed to one plugin's processor."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from mm_plugin.errors import RequestError
from mm_plugin.testing.corpus.entries import CorpusEntry

if TYPE_CHECKING:
    from mm_plugin.processor.processor import Processor


def sweep(processor: Processor, entries_: Iterable[CorpusEntry], *, may_refuse: Collection[str] = ()) -> list[str]:
    """Prepare every entry of a modality that the plugin accepts: what can be read becomes an item, all else a `RequestError`.

    Args:
        processor: an open processor, with the default limits.
        entries_: such as `corpus.images()`.
        may_refuse: names of entries that are readable but that the model cannot accept, usually for their shape.

    Returns:
        The names of those that became items.

    Raises:
        AssertionError: an entry ended in another way; the message says how.
    """
    prepared = []
    for entry in entries_:
        if entry.modality not in processor.spec.modalities:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about much that it still reads
                processor.prepare_item(entry.modality, entry.value)
        except RequestError as error:
            if not entry.refused and entry.name not in may_refuse:
                raise AssertionError(f"{entry.name} was refused: {error}") from error
        except Exception as error:
            raise AssertionError(f"{entry.name} ended in {type(error).__name__}: {error}") from error
        else:
            assert not entry.refused, f"{entry.name} was not refused"
            prepared.append(entry.name)
    return prepared
