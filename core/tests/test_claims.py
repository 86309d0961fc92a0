"""The claim table: what a row says, and that a new kind of service is a row and a hook specification."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from mm_plugin import ModelSpec, PluginLoadError, UsageError, hookspecs
from mm_plugin.registry.claims import CLAIM_GROUPS, ClaimGroup, group_of
from mm_plugin.registry.contracts import CONTRACTS, import_reference
from mm_plugin.registry.services import make_service, services_of


def test_every_kind_of_service_has_a_hook_and_every_hook_a_kind() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("mm_register_")}
    assert hooks == {"mm_register_models", *(group.hook for group in CLAIM_GROUPS.values() if group.hook)}
    for group in CLAIM_GROUPS.values():
        assert group_of(group.entry_points) is group
        assert group.hook is None or group.spec_field is None
        assert group.spec_field is None or group.spec_field in ModelSpec.__struct_fields__
    assert group_of("mm_plugin.nothing") is None
    assert group_of("mm_plugin") is None
    assert group_of("stores") is None


def test_the_core_s_own_services_are_of_the_class_that_a_plugin_s_must_be() -> None:
    for group in CLAIM_GROUPS.values():
        for reference in group.built_in.values():
            assert group.makes is not None
            assert issubclass(import_reference(reference), import_reference(group.makes))


def test_every_reference_of_a_spec_says_what_it_must_name() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(ModelSpec)}
    documented = set(re.findall(r"^ +(\w+): `\"module:", str(ModelSpec.__doc__), re.MULTILINE))
    assert documented | {"padding"} == set(CONTRACTS)
    for field, contract in CONTRACTS.items():
        assert field in fields
        # Of a class or of a function, never of both.
        assert (contract.base is None) != (contract.call is None)
        assert contract.base is None or isinstance(import_reference(contract.base), type)


SOURCE = """
from mm_plugin import hookimpl

@hookimpl
def mm_register_carriers():
    return {"swift": Carrier, "odd": lambda name: name}

class Carrier(dict):
    def __init__(self, name):
        self["name"] = name
"""


@pytest.fixture
def _carriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further kind of service: one row and one hook specification, and nothing else."""

    @hookspecs.hookspec
    def mm_register_carriers() -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Carriers by name."""

    row = ClaimGroup(
        kind="carriers",
        noun="carrier",
        hook="mm_register_carriers",
        makes="builtins:dict",
        built_in={"plain": "collections:OrderedDict"},
    )
    monkeypatch.setitem(CLAIM_GROUPS, row.kind, row)
    monkeypatch.setattr(hookspecs, "mm_register_carriers", mm_register_carriers, raising=False)


@pytest.mark.usefixtures("_carriers")
def test_a_new_kind_of_service_is_a_row_and_a_hook(
    site: Any, open_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("hauler", SOURCE, carriers=["swift", "odd"])
    registry = open_registry()
    (record,) = [record for record in registry.plugins if record.name == "hauler"]
    assert record.claims == {"carriers": ("swift", "odd")}
    assert registry.notices == ()
    group = CLAIM_GROUPS["carriers"]
    assert set(services_of(registry.catalog, "carriers")) == {"plain", "swift", "odd"}
    assert make_service(registry.catalog, group, "swift", "a") == {"name": "a"}
    assert make_service(registry.catalog, group, "plain") == {}
    with pytest.raises(PluginLoadError, match=r"carrier 'odd' must be a builtins\.dict, got str"):
        make_service(registry.catalog, group, "odd", "a")
    with pytest.raises(UsageError, match=r"unknown carrier 'slow'; known: plain, odd, swift"):
        make_service(registry.catalog, group, "slow")
    assert registry.load_plugin("hauler").state == "loaded"
