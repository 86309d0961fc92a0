"""The arguments of `mm-plugin`, its subcommands and their exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import mm_plugin
from mm_plugin.errors import MMPluginError


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="mm-plugin", description="Inspect the installed mm-plugin plugins, and see the framework at work."
    )
    parser.add_argument("--version", action="version", version=f"mm-plugin {mm_plugin.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="show what is installed, from metadata alone")
    listing.add_argument("--json", action="store_true", help="print JSON")

    settings = commands.add_parser("settings", help="show the settings in force, and where each comes from")
    settings.add_argument("--json", action="store_true", help="print JSON")

    doctor = commands.add_parser("doctor", help="import each plugin in a process of its own and report what is wrong")
    doctor.add_argument("name", nargs="?", metavar="NAME", help="examine this plugin only")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--timeout", type=_seconds, default=120.0, metavar="SECONDS", help="for one plugin (120)")

    demo = commands.add_parser("demo", help="process and embed two images, offline, and draw the result")
    demo.add_argument("--model", metavar="NAME", help="name of the plugin to show (the first that has a demo)")
    demo.add_argument(
        "--image", type=Path, action="append", metavar="FILE", help="an image of your own; may be repeated"
    )
    demo.add_argument(
        "--video",
        type=Path,
        action="append",
        metavar="FILE",
        help="a video of your own; may be repeated (extra `video`)",
    )
    demo.add_argument("--chunk", type=_count, default=64, metavar="TOKENS", help="tokens in a prefill chunk (64)")
    demo.add_argument("--out", type=Path, default=Path("mm-plugin-demo.png"), metavar="FILE", help="where to draw")
    demo.add_argument("--rebuild", action="store_true", help="build the tiny checkpoint again")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; the process's own where None.

    Returns:
        0 if nothing is wrong, 1 if something is broken, 2 if the arguments cannot be used.
    """
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command == "list":
            from mm_plugin.cli.list import list_plugins

            return list_plugins(as_json=arguments.json)
        if arguments.command == "settings":
            from mm_plugin.cli.settings import show_settings

            return show_settings(as_json=arguments.json)
        if arguments.command == "doctor":
            from mm_plugin.cli.doctor import doctor

            return doctor(arguments.name, as_json=arguments.json, timeout=arguments.timeout)
        from mm_plugin.cli.demo import demo

        return demo(
            arguments.model,
            images=arguments.image or (),
            videos=arguments.video or (),
            chunk=arguments.chunk,
            out=arguments.out,
            rebuild=arguments.rebuild,
        )
    except MMPluginError as error:
        print(f"mm-plugin: {error.message}", file=sys.stderr)  # noqa: T201 - this is a command
        return 2


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value
