"""Writes the generated parts of the pages in docs/.

    python scripts/generate_docs.py          # write them
    python scripts/generate_docs.py --check  # fail if they are not what the code says

A part lies between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of a page is by hand.
"""

from __future__ import annotations

import argparse
import enum
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdkv.endpoint import events as endpoint_events
from pdkv.endpoint.settings import NEEDS, backends_with
from pdkv.interfaces import Capabilities
from pdkv.observe import METRICS, WAITS, phases
from pdkv.protocol import AnyMessage, Frame, Identity, StageGrant, Wait, Waiting, words
from pdkv.request import events as machine_events
from pdkv.request.states import (
    ALLOCATION_TABLE,
    MEMORY_TABLE,
    RECEIVER_TABLE,
    SENDER_TABLE,
)

DOCS = Path(__file__).parent.parent / "docs"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Mapping[tuple[enum.Enum, enum.Enum], enum.Enum]

# Who says it to whom. A message that is not here stops the script.
DIRECTIONS = {
    "Hello": "decode -> prefill, and its answer",
    "Refused": "answer to a Hello",
    "TransferInfo": "decode -> prefill",
    "Announce": "decode -> prefill",
    "Computed": "prefill -> decode",
    "Recompute": "prefill -> decode",
    "Grant": "decode -> prefill",
    "Abort": "decode -> prefill",
    "Failed": "prefill -> decode",
    "Quiesced": "prefill -> decode",
    "Ask": "decode -> prefill",
    "Sent": "prefill -> decode",
    "Keepalive": "both ways",
    "Goodbye": "both ways",
}


def title(value: enum.Enum) -> str:
    """A state as a reader knows it."""
    return value.name if value.name != value.name.upper() else value.name.capitalize()


def diagram(table: Table, start: enum.Enum) -> str:
    """A Mermaid picture of every row that leads somewhere else."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {title(start)}"]
    lines += [
        f"    {title(state)} --> {title(after)}: {trigger.value}"
        for (state, trigger), after in table.items()
        if after is not state
    ]
    return "\n".join([*lines, "```"])


def grid(table: Table) -> str:
    """All rows: a line a state, a column a trigger. A dash: nothing changes."""
    states = list(dict.fromkeys(state for state, _ in table))
    triggers = list(dict.fromkeys(trigger for _, trigger in table))
    rows = [["state", *(str(trigger.value) for trigger in triggers)]]
    for state in states:
        targets = [table[state, trigger] for trigger in triggers]
        rows.append([title(state), *("-" if t is state else title(t) for t in targets)])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    return "\n".join(lines)


def first_sentence(kind: type) -> str:
    """What a class says it is, in one sentence."""
    text = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")


def classes(base: type) -> list[list[str]]:
    """The concrete classes under a base, by name."""
    found: dict[str, type] = {}
    todo = [base]
    while todo:
        for kind in todo.pop().__subclasses__():
            found[kind.__name__] = kind
            todo.append(kind)
    return [[f"`{name}`", first_sentence(found[name])] for name in sorted(found)]


def type_name(hint: Any) -> str:
    """A field's type in the words of MessagePack, with its limit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        meta = arguments[1]
        limits = [
            f"{sign} {number(value)}"
            for sign, value in (("≥", meta.ge), ("≤", meta.le))
            if value is not None
        ]
        if meta.max_length is not None:
            exact = meta.min_length == meta.max_length
            limits.append(f"{'' if exact else '≤ '}{number(meta.max_length)} long")
        return f"{type_name(arguments[0])} {', '.join(limits)}".strip()
    if origin is tuple:
        inner = [type_name(a) for a in arguments if a is not ...]
        return f"list of {inner[0]}" if ... in arguments else f"({', '.join(inner)})"
    names = {bytes: "bin", str: "str", bool: "bool", int: "int"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def number(value: int) -> str:
    """Large powers of two as such."""
    size = abs(value)
    for less in (0, 1):
        power = (size + less).bit_length() - 1
        if power > 11 and size + less == 1 << power:
            return f"{'-' if value < 0 else ''}2^{power}" + (" - 1" if less else "")
    return str(value)


def fields(kind: type) -> str:
    """Name, type and default of each field, in the order of the wire."""
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = [["#", "field", "type", "default"]]
    for index, info in enumerate(msgspec.structs.fields(kind)):
        default = "" if info.default is msgspec.NODEFAULT else f"`{info.default!r}`"
        rows.append([str(index), f"`{info.name}`", type_name(hints[info.name]), default])
    return markdown(rows)


def kinds() -> list[type]:
    return list(typing.get_args(AnyMessage))


def messages() -> str:
    rows = [["tag", "message", "who says it", "what it says"]]
    for kind in kinds():
        tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
        direction = DIRECTIONS[kind.__name__]
        rows.append([f"`{tag}`", f"`{kind.__name__}`", direction, first_sentence(kind)])
    return markdown(rows)


def message_fields() -> str:
    everything = [Identity, *kinds(), StageGrant, Waiting]
    parts = [f"### {kind.__name__}\n\n{fields(kind)}" for kind in everything]
    return "\n\n".join(parts)


def waits() -> str:
    source = Path(sys.modules[Wait.__module__].__file__ or "").read_text()
    rows = [["value", "name", "what I wait for"]]
    for wait in Wait:
        found = re.search(rf'{wait.name} = {wait.value}\n\s+"""(.*?)"""', source, re.DOTALL)
        assert found, f"{wait} says nothing of itself"
        rows.append([str(wait.value), f"`{wait.name}`", " ".join(found[1].split())])
    return markdown(rows)


def limits() -> str:
    names = [name for name in words.__all__ if name.isupper()]
    return markdown([["limit", "value"], *([f"`{n}`", number(getattr(words, n))] for n in names)])


def outcomes(table: Table) -> str:
    start = next(iter(table))[0]
    return f"{diagram(table, start)}\n\n{grid(table)}"


def metrics() -> str:
    rows = [["metric", "kind", "labels", "what it counts"]]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append([f"`{metric.name}`", metric.kind, labels, metric.help])
    return markdown(rows)


def phase_table() -> str:
    """As the module says it."""
    lines = (phases.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def waiting() -> str:
    rows = [["where", "`wait`", "for what"]]
    return markdown([*rows, *([place, f"`{w}`", text] for (place, w), text in WAITS.items())])


def needs() -> str:
    rows = [["setting", "needs", "of whom", "without it"]]
    for need in NEEDS:
        # Names stand as such; a sentence has marked its own.
        words = [w if " " in w or "`" in w else f"`{w}`" for w in need.any_of]
        rows.append([need.setting, " or ".join(words), need.whom, need.without])
    return markdown(rows)


def claims() -> str:
    """What each built-in backend's class says; one that must look at its package says so itself."""
    rows = [
        [f"`{name}`", ", ".join(f"`{b}`" for b in backends_with(name))]
        for name in Capabilities.__struct_fields__
    ]
    return markdown([["capability", "backends"], *rows])


PARTS: dict[str, Callable[[], str]] = {
    "receiver": lambda: outcomes(RECEIVER_TABLE),
    "sender": lambda: outcomes(SENDER_TABLE),
    "memory": lambda: outcomes(MEMORY_TABLE),
    "allocation": lambda: outcomes(ALLOCATION_TABLE),
    "events": lambda: markdown([["event", "meaning"], *classes(machine_events.Event)]),
    "actions": lambda: markdown([["action", "meaning"], *classes(machine_events.Action)]),
    "gate": lambda: markdown([["event", "meaning"], *classes(endpoint_events.EndpointEvent)]),
    "messages": messages,
    "fields": message_fields,
    "frame": lambda: fields(Frame),
    "waits": waits,
    "limits": limits,
    "metrics": metrics,
    "phases": phase_table,
    "waiting": waiting,
    "needs": needs,
    "claims": claims,
}


def render(text: str) -> str:
    """A page with every generated part written anew."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}"

    return PART.sub(part, text)


def pages() -> list[Path]:
    """Pages that have generated parts."""
    return [path for path in sorted(DOCS.glob("*.md")) if PART.search(path.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    stale = []
    for path in pages():
        text = path.read_text()
        fresh = render(text)
        if fresh != text:
            stale.append(path.name)
            if not check:
                path.write_text(fresh)
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
