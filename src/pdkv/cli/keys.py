"""`python -m pdkv keys`: make key pairs for the control plane, and look at an allow-list.

    keys new FOLDER NAME      NAME.key (for all peers) and NAME.key_secret (for nobody else)
    keys show FILE            the public key of either file, in hex as addresses carry it
    keys check SECRET FOLDER  whether a process could start with them, and whom it would trust

Layer 6.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdkv.control.zmq_keys import CurveSecurity, create_keys, load_public_key
from pdkv.errors import ConfigError

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run one of new, show and check; 1 when it can't be done."""
    parser = argparse.ArgumentParser(prog="python -m pdkv keys", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a key pair")
    new.add_argument("folder")
    new.add_argument("name")
    show = commands.add_parser("show", help="print a public key")
    show.add_argument("file")
    check = commands.add_parser("check", help="load a pair and an allow-list as a node would")
    check.add_argument("secret")
    check.add_argument("folder")
    options = parser.parse_args(arguments)
    try:
        for line in _lines(options):
            print(line)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _lines(options: argparse.Namespace) -> Iterable[str]:
    if options.command == "new":
        public, secret = create_keys(options.folder, options.name)
        return [
            f"{public}  for the allow-lists of all peers",
            f"{secret}  for {options.name} alone",
        ]
    if options.command == "show":
        return [load_public_key(options.file).hex()]
    return _checked(options.secret, options.folder)


def _checked(secret: str, folder: str) -> Iterator[str]:
    security = CurveSecurity.load(secret, folder)
    own = "is" if security.public_key in security.allowed else "is not"
    note = f"({own} on the list: needed by processes that share it)"
    yield f"own key {security.public_key.hex()} {note}"
    for path in sorted(Path(folder).glob("*.key")):
        yield f"trusts  {load_public_key(path).hex()}  {path.name}"
    if not security.allowed:
        raise ConfigError(
            f"{folder} lets no peer in: copy the NAME.key of each into it (not NAME.key_secret)"
        )
