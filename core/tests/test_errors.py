"""The tree of errors: who is under whom, what each carries, and that all of it crosses a process border."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from typing import Any

import pytest

from mm_plugin import errors
from mm_plugin.errors import MMPluginError

# class -> (parent, code, attributes)
TREE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "MMPluginError": ("Exception", "error", ()),
    "UsageError": ("MMPluginError", "usage", ("argument",)),
    "RequestError": ("MMPluginError", "request", ("path",)),
    "MediaError": ("RequestError", "media", ("path", "reason")),
    "PlaceholderError": ("RequestError", "placeholder", ("path", "expected", "found")),
    "LimitError": ("RequestError", "limit", ("path", "setting", "limit", "value")),
    "DeadlineError": ("RequestError", "deadline", ("path", "running")),
    "PluginError": ("MMPluginError", "plugin", ("plugin", "distribution", "version")),
    "PluginLoadError": ("PluginError", "plugin_load", ("plugin", "distribution", "version", "record")),
    "ProcessorError": ("PluginError", "processor", ("plugin", "distribution", "version")),
    "EncoderError": ("PluginError", "encoder", ("plugin", "distribution", "version")),
    "NoModelError": ("MMPluginError", "no_model", ("asked", "records", "served")),
    "UnattributedError": ("MMPluginError", "unattributed", ()),
    "SpanError": ("UnattributedError", "span", ()),
    "SizeError": ("UnattributedError", "size", ()),
    "SpecError": ("UnattributedError", "spec", ()),
}


def error_classes() -> dict[str, type[MMPluginError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def test_there_are_exactly_these_errors() -> None:
    assert set(error_classes()) == set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_its_parent_code_and_attributes(name: str) -> None:
    parent, code, attributes = TREE[name]
    cls = error_classes()[name]
    assert [base.__name__ for base in cls.__bases__] == [parent]
    assert cls.code == code
    assert set(cls.attributes) == set(attributes)


def test_codes_are_distinct() -> None:
    codes = [cls.code for cls in error_classes().values()]
    assert len(set(codes)) == len(codes)


def test_the_docstring_draws_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([\s│├└─]*)(\w+Error)\b", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        while above and above[-1][0] >= depth:
            above.pop()
        drawn[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    assert drawn == {name: parent for name, (parent, _, _) in TREE.items()}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", TREE)
def test_an_error_pickles_with_its_attributes(name: str, protocol: int) -> None:
    given = {attribute: f"{attribute} ü 7" for attribute in TREE[name][2]}
    error = error_classes()[name]("what failed\n  and why", **given)
    read = pickle.loads(pickle.dumps(error, protocol))
    assert type(read) is type(error)
    assert (str(read), read.message, read.args) == ("what failed\n  and why", "what failed\n  and why", error.args)
    assert {attribute: getattr(read, attribute) for attribute in given} == given
    copied = copy.copy(error)
    assert {attribute: getattr(copied, attribute) for attribute in given} == given


@pytest.mark.parametrize("name", TREE)
def test_an_attribute_that_was_not_given_is_none_and_stays_none(name: str) -> None:
    error = error_classes()[name]("x")
    for read in (error, pickle.loads(pickle.dumps(error))):
        assert [getattr(read, attribute) for attribute in TREE[name][2]] == [None] * len(TREE[name][2])


@pytest.mark.parametrize("name", TREE)
def test_a_misspelt_attribute_is_a_type_error_that_names_it(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} has no attribute pathh"):
        error_classes()[name]("x", pathh="images[0]")


def test_records_of_plugins_cross_a_process_border() -> None:
    from mm_plugin import NoModelError, PluginLoadError, PluginRecord

    record = PluginRecord(
        name="a",
        distribution="a-dist",
        version="1.2",
        entry_point="a.hooks",
        location="/site",
        claims={"architectures": ("A",)},
        state="failed",
        stage="import",
        code="import_error",
        traceback="Traceback ...",
    )
    missing: Any = pickle.loads(pickle.dumps(NoModelError("no", asked=("A",), records=(record,), served=("B",))))
    assert (missing.asked, missing.records, missing.served) == (("A",), (record,), ("B",))
    broken: Any = pickle.loads(pickle.dumps(PluginLoadError("no", plugin="a", record=record)))
    assert (broken.plugin, broken.distribution, broken.record) == ("a", None, record)


def test_a_subclass_elsewhere_pickles_too() -> None:
    assert pickle.loads(pickle.dumps(Stricter("x", path="images[1]", reason="size"))).reason == "size"


def test_an_error_with_a_constructor_of_its_own_pickles_too() -> None:
    copy = pickle.loads(pickle.dumps(Counted(3)))
    assert (copy.message, copy.path, copy.count, str(copy)) == ("3 of them", "images[0]", 3, "3 of them")


class Counted(errors.MediaError):
    """An error of a plugin that takes other arguments."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} of them", path="images[0]")
        self.count = count


class Stricter(errors.MediaError):
    """An error that a plugin might add."""


@pytest.mark.parametrize(
    ("name", "caught"),
    [("MediaError", "RequestError"), ("EncoderError", "PluginError"), ("SpanError", "MMPluginError")],
)
def test_an_error_is_caught_by_what_stands_above_it(name: str, caught: str) -> None:
    classes = error_classes()
    with pytest.raises(classes[caught]):
        raise classes[name]("x")


def test_a_client_error_is_no_plugin_error() -> None:
    assert not issubclass(errors.RequestError, errors.PluginError | errors.UsageError | errors.UnattributedError)


@pytest.mark.parametrize(
    ("arguments", "message", "limit", "value"),
    [
        (
            {"path": "images[0]", "limit": 100, "value": 120, "fix": "send a smaller image"},
            "images[0]: expected at most 100 pixels, got 120; raise max_it or send a smaller image",
            100,
            120,
        ),
        (
            {"path": "images[0]", "limit": 100, "value": 120, "found": "10 x 12"},
            "images[0]: expected at most 100 pixels, got 10 x 12; raise max_it",
            100,
            120,
        ),
        ({"path": None, "limit": 3, "value": 4}, "request: expected at most 3 pixels, got 4; raise max_it", 3, 4),
        ({"path": "a", "limit": 3, "value": None}, "a: expected at most 3 pixels, got more; raise max_it", 3, None),
        ({"path": "a", "limit": 7200.0, "value": 7200.5}, "a: expected at most 7200 pixels, got 7200.5; raise max_it", 7200, 7200),
        (
            {"path": "a", "limit": 1.5, "value": float("inf")},
            "a: expected at most 1.5 pixels, got inf; raise max_it",
            1,
            sys.maxsize,
        ),
        (
            {"path": "a", "limit": 10, "value": 1 << 80, "found": "many"},
            "a: expected at most 10 pixels, got many; raise max_it",
            10,
            sys.maxsize,
        ),
    ],
)  # fmt: skip
def test_every_limit_speaks_in_one_form(arguments: Any, message: str, limit: int, value: int | None) -> None:
    error = errors.LimitError.exceeded("pixels", setting="max_it", **arguments)
    assert (str(error), error.setting, error.limit, error.value) == (message, "max_it", limit, value)
    assert error.path == arguments["path"]
