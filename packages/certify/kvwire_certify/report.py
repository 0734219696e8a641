"""The reports of a run: a page for people, and JUnit for CI."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvwire_certify.oracle import RULES
from kvwire_certify.runner import Breach, Certificate


def file_name(breach: Breach) -> str:
    """Return the file name for a breach."""
    target = "".join(c if c.isalnum() else "-" for c in breach.target).strip("-")
    return f"certify-{target}-{breach.rule}-{breach.schedule.seed}.json"


def page(certificate: Certificate) -> RenderableType:
    """Return the page for people: each promise, and each breach with its steps."""
    version = f" {certificate.version}" if certificate.version else ""
    head = Text(
        f"{certificate.target}{version}: {certificate.schedules} schedules, "
        f"{certificate.operations} operations landed, {certificate.seconds:.0f} s\n"
    )
    broken = {breach.rule for breach in certificate.breaches}
    table = Table(box=None, show_header=False, pad_edge=False)
    for rule, promise in RULES.items():
        if rule in certificate.unchecked:
            continue
        style = "red" if rule in broken else "green"
        verdict = Text("BROKEN" if rule in broken else "kept", style)
        table.add_row(verdict, rule, promise)
    unchecked = ", ".join(certificate.unchecked)
    rest = [Text(f"\nnot checked: {unchecked}", "dim")] if unchecked else []
    return Group(head, table, *rest, *map(_shown, certificate.breaches))


def _shown(breach: Breach) -> RenderableType:
    seeds = ", ".join(map(str, breach.seeds[:8]))
    more = f" and {len(breach.seeds) - 8} more" if len(breach.seeds) > 8 else ""
    found = f"seeds {seeds}{more}; " if seeds else ""
    text = Text(f"\n{breach.rule}: {RULES[breach.rule]}\n", "bold")
    text.append(f"{breach.text}\n", "not bold")
    text.append(
        f"{found}reproduced in {breach.again} of {breach.times} replays\n",
        "dim",
    )
    schedule = breach.schedule
    steps = [f"memory of {schedule.slots} slots of {schedule.slot_bytes >> 10} KiB"]
    steps += map(str, schedule.steps)
    return Group(text, Padding(Text("\n".join(steps)), (0, 0, 0, 2)))


def junit(certificate: Certificate) -> bytes:
    """Return JUnit XML with one test case for each promise."""
    failed: dict[str, list[Breach]] = {}
    for breach in certificate.breaches:
        failed.setdefault(breach.rule, []).append(breach)
    suite = ET.Element(
        "testsuite",
        name=f"kvwire certify {certificate.target}",
        tests=str(len(RULES)),
        failures=str(len(failed)),
        skipped=str(len(certificate.unchecked)),
        time=f"{certificate.seconds:.3f}",
    )
    for rule, promise in RULES.items():
        case = ET.SubElement(suite, "testcase", classname=certificate.target, name=rule)
        if rule in certificate.unchecked:
            ET.SubElement(case, "skipped", message="no schedule has checked it")
        elif rule in failed:
            failure = ET.SubElement(case, "failure", message=promise)
            failure.text = _printable("\n\n".join(f.text for f in failed[rule]))
    document: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return document


def _printable(text: str) -> str:
    """Remove characters that XML forbids; a crashing library may print any."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
