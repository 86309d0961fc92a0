"""`Plugin`: one installed plugin as the registry sees it, and errors that name the plugin at fault."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import MMPluginError, PluginError, PluginLoadError, UsageError, is_readable
from mm_plugin.foreign import is_interruption, text_of, words
from mm_plugin.forking import new_rlock
from mm_plugin.metadata import in_words
from mm_plugin.registry.distributions import Distribution
from mm_plugin.registry.records import OpenedModel, PluginRecord, State

if TYPE_CHECKING:
    from mm_plugin.spec import ModelSpec


class Plugin:
    """One installed plugin; `record()` is what others see of it. Final; changed under the catalog's lock only.

    Its code runs under `importing`, never under the catalog's lock: an import that hangs is waited for by those alone who need it.

    Attributes:
        name: its entry point's name in the group `mm_plugin`.
        module: the hooks module.
        dist: its distribution.
        claims: what its metadata claims, by kind.
        state: as in `PluginRecord`.
        facts: further fields of its record.
        specs: the models that it declares, once it is loaded.
        services: its services by kind and name, once it is loaded.
        opened: what it made of checkpoints, by folder.
        importing: held while it is imported; plugins of one top-level package have one, since a failed import removes what it
            left of the package.
    """

    def __init__(self, name: str, module: str, dist: Distribution) -> None:
        self.name, self.module, self.dist = name, module, dist
        self.claims: dict[str, list[str]] = {}
        self.state: State = "available"
        self.facts: dict[str, Any] = {}
        self.specs: tuple[ModelSpec, ...] = ()
        self.services: Mapping[str, Mapping[str, Any]] = {}
        self.opened: dict[str, OpenedModel] = {}
        self.importing = new_rlock()

    @property
    def distribution(self) -> str:
        """Name of the distribution."""
        return self.dist.name

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return self.dist.version

    @property
    def label(self) -> str:
        """Names it in messages."""
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def owner(self) -> dict[str, str]:
        """The attributes by which a `PluginError` names it."""
        return {"plugin": self.name, "distribution": self.distribution, "version": self.version}

    @property
    def enabled(self) -> bool:
        """Whether it may be imported: the settings let it, and no other distribution of its name hides it."""
        return self.state not in ("disabled", "shadowed")

    @property
    def disputed(self) -> bool:
        """Whether another plugin makes one of its claims; its other claims, and callers that choose it, are still served."""
        return self.facts.get("code") == "claim_conflict"

    def record(self) -> PluginRecord:
        """A snapshot of what is known of it."""
        return PluginRecord(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.module,
            location=self.dist.location,
            claims={kind: tuple(names) for kind, names in sorted(self.claims.items())},
            state=self.state,
            report_to=self.dist.report_to,
            opened=tuple(self.opened.values()),
            **self.facts,
        )

    def refuse(self, state: State, **facts: Any) -> None:
        """Take it out of use, with the fields of the record that say why."""
        self.state, self.facts = state, facts

    def load_error(self) -> PluginLoadError:
        """Its record as an error."""
        record = self.record()
        return PluginLoadError(record.summary(), record=record, **self.owner)

    def where(self, error: BaseException) -> str | None:
        """`file:line` of the last frame of an exception inside the plugin's package: where its author has to look."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        last = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            if self.holds(frame.f_globals.get("__name__", "")):
                last = f"{frame.f_code.co_filename}:{line}"
        return last

    @property
    def package(self) -> str:
        """Its top-level package."""
        return self.module.partition(".")[0]

    def holds(self, module: str) -> bool:
        """Whether a module, given by its full name, belongs to the plugin's top-level package."""
        return module.partition(".")[0] == self.package


@contextlib.contextmanager
def translate_errors(plugin: Plugin, kind: type[PluginError], what: str) -> Iterator[None]:
    """Turn whatever plugin code raises into an error that names the plugin.

    Args:
        plugin: whose code runs.
        kind: class of the error.
        what: what failed, for the message.

    Raises:
        UsageError, PluginError: unchanged; they name the party at fault already.
        PluginError: of class `kind`, for every other exception but a keyboard interrupt.
    """
    try:
        yield
    except MMPluginError as error:
        if isinstance(error, UsageError | PluginError) and is_readable(error):
            raise
        raise kind(f"{plugin.label}: {what}: {text_of(error)}", **plugin.owner) from error
    except BaseException as error:
        if is_interruption(error):
            raise
        where = plugin.where(error)
        place = f" [{where}]" if where else ""
        raise kind(
            f"{plugin.label}: {what}: {words(error)}{place}{in_words(error)}",
            **plugin.owner,
        ) from error
