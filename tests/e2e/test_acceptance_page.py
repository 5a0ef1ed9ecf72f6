"""The check of tests/ACCEPTANCE.md finds what is missing. Whether the page itself holds is checked at the end of `make test`."""

import acceptance

PAGE = acceptance.PAGE.read_text()
ALL_PASSED = {proof: True for _, proofs, _ in acceptance.read_page(PAGE) for proof in proofs}


def test_a_page_whose_tests_all_passed_is_right():
    assert acceptance.check(PAGE, ALL_PASSED) == []


def test_a_line_that_is_missing_changed_or_without_proof_is_found():
    line, proofs, _ = acceptance.read_page(PAGE)[1]
    assert acceptance.check(PAGE.replace(f"- {line}\n", ""), ALL_PASSED)
    assert acceptance.check(PAGE.replace(line, line + " mostly"), ALL_PASSED)
    bare = PAGE
    for proof in proofs:
        bare = bare.replace(f"  - `{proof}`\n", "", 1)
    assert any("nothing proves" in sentence for sentence in acceptance.check(bare, ALL_PASSED))


def test_a_test_that_did_not_run_failed_or_was_skipped_is_found():
    proof = next(iter(ALL_PASSED))
    assert acceptance.check(PAGE, {name: True for name in ALL_PASSED if name != proof}) == [f"{proof} did not run"]
    assert acceptance.check(PAGE, {**ALL_PASSED, proof: False}) == [f"{proof} failed or was skipped"]


def test_the_runners_own_words_are_read(tmp_path):
    log = ("     Running unittests src/lib.rs (target/debug/deps/ballast_schemas-35d988f3be142aa8)\n"
           "test digest::tests::a ... ok\ntest digest::tests::b - should panic ... ok\ntest digest::tests::c ... ignored\n")
    assert acceptance.cargo_results(log) == {"ballast_schemas::digest::tests::a": True, "ballast_schemas::digest::tests::b": True, "ballast_schemas::digest::tests::c": False}
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite><testcase classname="tests.e2e.test_x" name="test_a[1]"/>'
                      '<testcase classname="tests.e2e.test_x" name="test_a[2]"><failure/></testcase><testcase classname="test_x" name="test_b"/></testsuite></testsuites>')
    assert acceptance.pytest_results(report) == {"test_x.py::test_a": False, "test_x.py::test_b": True}
