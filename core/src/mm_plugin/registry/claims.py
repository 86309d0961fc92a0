"""The claim table: what a plugin can say it serves, one row for each entry-point group. A new kind of service is a new row.

Besides its row, a kind of service needs one hook specification (`mm_plugin.hookspecs`), of the name that the row gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mm_plugin.registry.records import Refusal

if TYPE_CHECKING:
    from mm_plugin.spec import ModelSpec

PLUGINS = "mm_plugin"
_PREFIX = PLUGINS + "."


class ClaimGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of claim. What the metadata claims and what the code declares must be equal.

    Example:
        >>> ClaimGroup(kind="stores", noun="store", hook="mm_register_stores").entry_points
        'mm_plugin.stores'

    Attributes:
        kind: names it, in records and to `services_of`.
        noun: one claim of this kind, for messages.
        exclusive: whether one name may be claimed by one enabled plugin only.
        spec_field: the field of `ModelSpec` that declares it; None for what models do not declare.
        hook: the hook that returns services of this kind, a mapping from name to callable; None for what is not a service.
        makes: `"module:Class"`: a service of this kind is a factory, and what it makes must be an instance of this class. None
            where the callable is itself the service.
        built_in: `"module:Name"` of the core's own services, by name. They take precedence over a plugin's.
    """

    kind: str
    noun: str
    exclusive: bool = True
    spec_field: str | None = None
    hook: str | None = None
    makes: str | None = None
    built_in: Mapping[str, str] = {}

    @property
    def entry_points(self) -> str:
        """The entry-point group."""
        return f"{_PREFIX}{self.kind}"


ARCHITECTURES = ClaimGroup(kind="architectures", noun="architecture", spec_field="architectures")
MODEL_TYPES = ClaimGroup(kind="model_types", noun="model type", spec_field="model_types")
FALLBACK = ClaimGroup(kind="fallback", noun="fallback", exclusive=False)
DIGESTS = ClaimGroup(kind="digests", noun="digest", hook="mm_register_digests")
STORES = ClaimGroup(
    kind="stores",
    noun="store",
    hook="mm_register_stores",
    makes="mm_plugin.cache.store:Store",
    built_in={"memory": "mm_plugin.cache.memory:MemoryStore"},
)
OBSERVERS = ClaimGroup(kind="observers", noun="observer", hook="mm_register_observers")

CLAIM_GROUPS = {group.kind: group for group in (ARCHITECTURES, MODEL_TYPES, FALLBACK, DIGESTS, STORES, OBSERVERS)}


def is_claim(entry_points: str) -> bool:
    """Whether an entry-point group is meant for claims; `group_of` says whether there is such a kind."""
    return entry_points.startswith(_PREFIX)


def group_of(entry_points: str) -> ClaimGroup | None:
    """The row of an entry-point group, such as `mm_plugin.stores`; None if there is none."""
    return CLAIM_GROUPS.get(entry_points.removeprefix(_PREFIX)) if is_claim(entry_points) else None


def check_claims(
    claims: Mapping[str, Sequence[str]], specs: Sequence[ModelSpec], services: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse a plugin whose code does not declare exactly what its metadata claims.

    Args:
        claims: names from the metadata, by kind.
        specs: what `mm_register_models` returned.
        services: what the other hooks returned, by kind.

    Raises:
        Refusal: they differ.
    """
    for group in CLAIM_GROUPS.values():
        if group.spec_field is not None:
            declared = [name for spec in specs for name in getattr(spec, group.spec_field)]
            _compare(group, claims.get(group.kind, ()), declared)
        elif group.hook is not None:
            _compare(group, claims.get(group.kind, ()), list(services.get(group.kind, ())))
    if FALLBACK.kind in claims and len(specs) != 1:
        raise Refusal(f"a fallback must declare exactly one ModelSpec, found {len(specs)}", code="claim_mismatch")
    names = Counter(spec.name for spec in specs)
    for name, count in names.items():
        if count > 1:
            raise Refusal(
                f"{count} ModelSpecs are named {name!r}, which is part of every identity",
                code="bad_spec",
                hint="give each ModelSpec a name of its own",
            )


def _compare(group: ClaimGroup, claimed: Sequence[str], declared: Sequence[str]) -> None:
    repeated = sorted(name for name, count in Counter(declared).items() if count > 1)
    if repeated:
        raise Refusal(f"{group.noun} {repeated[0]!r} is in more than one ModelSpec", code="claim_mismatch")
    unserved, unclaimed = sorted(set(claimed) - set(declared)), sorted(set(declared) - set(claimed))
    if unserved:
        raise Refusal(
            f"the metadata claims {group.noun} {unserved[0]!r}, the code declares {sorted(declared) or 'none'}",
            code="claim_mismatch",
            hint=f"declare it, or remove it from the entry points in {group.entry_points!r} and reinstall",
        )
    if unclaimed:
        raise Refusal(
            f"the code declares {group.noun} {unclaimed[0]!r}, which the metadata does not claim",
            code="claim_mismatch",
            hint=f"add it to the entry points in {group.entry_points!r} and reinstall",
        )
