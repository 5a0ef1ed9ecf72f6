"""Checks tests/ACCEPTANCE.md: every line of the RFC's plan is there, and every test that it names ran and passed.

Usage: ops/acceptance.py CARGO_LOG JUNIT_XML... (what `make test` leaves in target/test)
"""

import hashlib
import pathlib
import re
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests/ACCEPTANCE.md"
# The RFC's lines: how many there are, and the SHA-256 of all of them, one a line.
LINES = 40
LINES_SHA256 = "aa0909e9bbd70e57353f6c29fee42380ba10499a7920ed4b851db7787455b0bf"


def read_page(text):
    """The page's (line, proofs, remarks)."""
    found = []
    for line in text.splitlines():
        if line.startswith("- "):
            found.append((line[2:], [], []))
        elif line.startswith("  - Not proved: "):
            found[-1][2].append(line)
        elif line.startswith("  - "):
            found[-1][1].extend(re.fullmatch(r"  - `([^`]+)`", line).groups())
    return found


def cargo_results(log):
    """Whether each Rust test passed, by crate and path."""
    results, crate = {}, None
    for line in log.splitlines():
        if running := re.search(r"Running .*/deps/(\w+)-[0-9a-f]+", line):
            crate = running[1]
        elif test := re.match(r"test (\S+)(?: - should panic)? \.\.\. (\w+)", line):
            name = f"{crate}::{test[1]}"
            results[name] = results.get(name, True) and test[2] == "ok"
    return results


def pytest_results(report):
    """Whether each test function passed with every parameter, by file and name."""
    results = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').rsplit('.', 1)[-1]}.py::{case.get('name').split('[')[0]}"
        passed = not any(case.find(bad) is not None for bad in ("failure", "error", "skipped"))
        results[name] = results.get(name, True) and passed
    return results


def check(page, results):
    """What is wrong, in sentences."""
    wrong = []
    found = read_page(page)
    if len(found) != LINES or hashlib.sha256("\n".join(line for line, *_ in found).encode()).hexdigest() != LINES_SHA256:
        wrong.append(f"{PAGE.name} has {len(found)} lines of the RFC's {LINES}, or some are not in its words")
    for line, proofs, remarks in found:
        if not proofs and not remarks:
            wrong.append(f"nothing proves, and nothing says that it is not proved: {line}")
        for proof in proofs:
            if "/" in proof:
                if not (ROOT / proof).is_file():
                    wrong.append(f"the file {proof} is not there")
            elif not results.get(proof, False):
                wrong.append(f"{proof} {'failed or was skipped' if proof in results else 'did not run'}")
    return wrong


def main():
    cargo_log, *reports = map(pathlib.Path, sys.argv[1:])
    results = cargo_results(cargo_log.read_text(errors="replace"))
    for report in reports:
        results.update(pytest_results(report))
    page = PAGE.read_text()
    wrong = check(page, results)
    for sentence in dict.fromkeys(wrong):
        print(f"error: {sentence}", file=sys.stderr)
    lines = read_page(page)
    print(f"{len(lines)} lines of the RFC; {sum(bool(proofs) for _, proofs, _ in lines)} with tests, "
          f"{sum(bool(remarks) for *_, remarks in lines)} not or not wholly proved, as the page says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
