"""`python -m pdkv COMMAND`: hands over to `pdkv.cli.COMMAND`, loading no other.

A command is a module of `pdkv.cli` with a `main(arguments: list[str]) -> int`. Layer 6.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

from pdkv import cli


def main(arguments: list[str]) -> int:
    """Run one command; its exit status."""
    names = (module.name for module in pkgutil.iter_modules(cli.__path__))
    commands = sorted(name for name in names if not name.startswith("_"))
    if not arguments or arguments[0] not in commands:
        asked = arguments[:1]
        help_asked = asked in ([], ["-h"], ["--help"])
        print(f"usage: python -m pdkv {{{','.join(commands)}}} ...", file=sys.stderr)
        if not help_asked:
            print(f"no command {asked[0]!r}", file=sys.stderr)
        return 0 if help_asked and asked else 2
    return int(import_module(f"pdkv.cli.{arguments[0]}").main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
