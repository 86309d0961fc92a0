"""Hashes and identities by which a caller knows its media inputs: aligned, made into identities, and bound to content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mm_plugin.errors import RequestError
from mm_plugin.events import HashIgnored, Observers
from mm_plugin.identity.digests import digest
from mm_plugin.identity.framing import frame
from mm_plugin.identity.keys import caller_identity, parse_caller_hash, parse_caller_name
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.processor.arguments import HashScope, is_list
from mm_plugin.processor.request import Claim, Facts, ReadyItem
from mm_plugin.runtime import CallerHashes as Bindings

logger = logging.getLogger("mm_plugin")

CallerHash = int | str
# By scope, how an entry is read, and why one is ignored that cannot be.
_READERS: Mapping[HashScope, tuple[Callable[[Any], CallerHash | None], str]] = {
    "fingerprinted": (parse_caller_name, "it is neither a whole number nor text of 1 to 1,024 characters"),
    "raw": (parse_caller_hash, "it is not a hexadecimal number"),
}


class CallerHashes:
    """The caller's hashes for one open model. Final; safe to use from several threads.

    Args:
        name: the model spec's name.
        output_version: the spec's output version.
        model_digest: 32 bytes that tell this model from others of one registry.
        bindings: what each hash stood for, shared by the models of a registry.
        observers: hear of hashes that are ignored.
    """

    def __init__(
        self, name: str, output_version: int, model_digest: bytes, bindings: Bindings, observers: Observers
    ) -> None:
        self._name, self._owner = name, (name, output_version, model_digest)
        self._bindings, self._observers = bindings, observers
        self._logged: set[str] = set()

    def ignore(self, path: str, why: str) -> None:
        """Report that a caller's hash is not used; the log has the first of its kind only."""
        self._observers.emit(HashIgnored(path=path, why=why))
        if why not in self._logged:
            self._logged.add(why)
            logger.warning("mm-plugin: %s: %s ignored: %s", self._name, path, why)

    def align(
        self, given: Any, counts: Mapping[Modality, int], scope: HashScope
    ) -> dict[Modality, list[CallerHash | None]] | None:
        """The hashes by modality, one for each media input; None where none can be used."""
        return align_hashes(given, counts, scope, self.ignore)

    def identify(self, item: MultimodalDataItem, entry: ReadyItem, facts: Facts) -> Claim | None:
        """Give an item its identity: that of its content, or that of the caller's hash, with what the hash must stand for."""
        value, arguments = entry.caller_hash, facts.arguments
        if value is None:
            item.set_identity(entry.prepared.identity)
            return None
        # Two models may know one media input by one hash.
        if isinstance(value, int) and arguments.mm_hash_scope == "raw":
            item.set_hash(value)
            return ("raw", *self._owner, item.hash), entry.prepared.identity, entry.path
        name, version, _ = self._owner
        identity = caller_identity(
            name, version, item.modality, value, entry.settings.effective, facts.context, salt=arguments.salt
        )
        item.set_identity(identity)
        return ("fingerprinted", *self._owner, identity), entry.prepared.identity, entry.path

    def name_embeddings(self, own: bytes, content: bytes, path: str, salt: str | bytes | None) -> tuple[bytes, Claim]:
        """The content by which embeddings that the caller names are identified, and what the name must stand for.

        Args:
            own: 32 bytes, the caller's identity of the embeddings.
            content: 32 bytes, their feature digest.
            path: where they stand in the request.
            salt: separates tenants.
        """
        # A kind of digest of its own, so that it equals no computed one.
        named = digest(frame(["caller-rows", own, salt]))
        name, _, model = self._owner
        return named, (("rows", name, model, named), content, path)

    def bind(self, claims: Sequence[Claim]) -> None:
        """Remember what each of the caller's names stands for, all of a request's or none.

        Raises:
            RequestError: a name stood for other content before.
        """
        if not claims:
            return
        path = self._bindings.bind([(digest(frame(list(name))), content, path) for name, content, path in claims])
        if path is not None:
            raise RequestError(
                f"{path}: the hash or identity given for it stood for another media input before, or for this one prepared in "
                "another way; give each content and preparation a name of its own",
                path=path,
            )


def align_hashes(
    given: Any, counts: Mapping[Modality, int], scope: HashScope, ignore: Callable[[str, str], None]
) -> dict[Modality, list[CallerHash | None]] | None:
    """The caller's hashes aligned with the media inputs; None where there are none, or not as many.

    Args:
        given: by argument name, or one list in the order of the modalities.
        counts: media inputs by modality.
        scope: of the hashes; `raw` takes numbers alone, since it keeps 64 bits of them.
        ignore: hears of the path of what is not used, and why.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        unknown = set(given) - {modality.argument for modality in Modality}
        found_parts = {modality: given.get(modality.argument) for modality in Modality}
        entries = {modality: () if part is None else part for modality, part in found_parts.items()}
        aligned = not unknown and all(is_list(part) for part in entries.values())
        aligned = aligned and all(len(part) in (0, counts.get(modality, 0)) for modality, part in entries.items())
        aligned = aligned and not any(part and modality not in counts for modality, part in entries.items())
    else:
        aligned = is_list(given) and len(given) == sum(counts.values())
        entries = {}
        if aligned:
            rest = iter(given)
            entries = {modality: [next(rest) for _ in range(count)] for modality, count in sorted(counts.items())}
    if not aligned:
        ignore("mm_hashes", "they are not aligned with the media")
        return None
    parse, wanted = _READERS[scope]
    found: dict[Modality, list[CallerHash | None]] = {}
    for modality, count in counts.items():
        found[modality] = [None] * count
        for index, entry in enumerate(entries.get(modality) or ()):
            value = parse(entry)
            if value is None and entry is not None:
                ignore(f"mm_hashes[{modality.argument}][{index}]", wanted)
            found[modality][index] = value
    return found
