"""A run as JUnit's XML, which CI systems show: a test for each case and, with `cluster.distribute`, node."""

from __future__ import annotations

from xml.etree import ElementTree

from minfer.rows.store import FAILED
from minfer.run.progress import RunProgress


def to_xml(progress: RunProgress) -> bytes:
    """The file's bytes. A case whose kernel failed is a failure. A case without a row is an error, with its shard's reason, or
    skipped while a job may still run it. A case that the kernel does not support is skipped."""
    rows = progress.run.rows(["status", "message"])
    reasons = progress.reasons()
    suite = ElementTree.Element("testsuite", name=progress.run.name)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for shard in progress.shards.values():
        for case in shard.all_cases:
            op, kernel = case.split("/")[:2]
            name = f"{case} on {shard.pinned}" if shard.pinned else case
            test = ElementTree.SubElement(suite, "testcase", classname=f"{op}.{kernel}", name=name)
            counts["tests"] += 1
            row = rows.get((shard.name, case))
            status, message = (row["status"], row["message"] or "") if row else ("", "")
            if status in FAILED:
                tag, word = "failure", "failures"
            elif status == "unsupported":
                tag, word = "skipped", "skipped"
            elif row or case in shard.skipped:
                continue
            elif shard.name in reasons:
                tag, word, message = "error", "errors", f"no row: {reasons[shard.name]}"
            else:
                tag, word, message = "skipped", "skipped", f"no row yet: its job is {shard.state}"
            counts[word] += 1
            text = f"{status}: {message}" if status else message
            ElementTree.SubElement(test, tag, message="".join(c for c in text if c.isprintable()))
    suite.attrib |= {name: str(count) for name, count in counts.items()}
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
