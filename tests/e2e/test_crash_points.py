"""A short form of `make crash-sweep`: a few points of it, and that no step of the code is missing from it."""

import crash_sweep

SHORT = {
    ("HOT to COLD", "migration.authorize_release.after"),
    ("deletion", "deletion.delete_units.before"),
    ("PUT_FIRST", "replacement.replacement_advanced.after"),
    ("HOT to COLD, the node dies", "node.release_memory.middle"),
    ("COLD to HOT, the node dies", "node.copy_to_memory.middle"),
}


def test_the_sweep_strikes_every_step_that_the_code_has(binary):
    assert {point.failpoint for point in crash_sweep.all_points(binary)} == set(crash_sweep.failpoints(binary))


def test_killed_at_a_step_an_operation_goes_on_under_its_id_and_leaves_nothing(binary, session_folder):
    points = [point for point in crash_sweep.all_points(binary) if (point.story.name, point.failpoint) in SHORT]
    assert len(points) == len(SHORT)
    sweep = crash_sweep.Sweep(session_folder / "sweep", binary, points, lanes=5).run()
    assert not sweep.failed and len(sweep.done) == len(points)
