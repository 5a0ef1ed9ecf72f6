"""The eleven operations: the RFC's example, records, errors, idempotence (RFC, Python API; Acceptance Plan, Contract and API)."""

import dataclasses
import enum
import inspect

import numpy as np
import pytest

import ballast
from ballast import (
    WeightAvailability, WeightMigrationMode, WeightOperationStatus, WeightResidencyState, WeightSnapshot, WeightStoragePolicy,
    WeightUpsertMode,
)
from conftest import leases, tensors, until

ELEVEN = [
    "weight_get", "weight_get_metadata", "weight_get_operation", "weight_get_size", "weight_is_exist", "weight_list",
    "weight_migrate", "weight_put", "weight_remove", "weight_update_policy", "weight_upsert",
]
HOT = WeightStoragePolicy(WeightResidencyState.HOT, 0.5, WeightMigrationMode.MANUAL)


def snapshot_of(values, name, generation=1):
    return WeightSnapshot.from_tensors(values, resource_id=name, weight_generation=generation)


def publish(store, values, name, generation=1, policy=HOT):
    with store.weight_put(snapshot_of(values, name, generation), None, policy=policy) as writer:
        for key, value in values.items():
            writer.weight_put_tensor(key, value)
    return writer.identity


def at_rest(store, identity):
    """The revision's view once no operation is active."""
    return until(lambda: (view := store.weight_get_metadata(identity)).metadata.operation_id is None and view)


def test_a_policy_comes_from_the_call_then_the_store_then_the_cluster(store, cluster, name):
    values = tensors(7)
    of_store = WeightStoragePolicy(WeightResidencyState.HOT, 0.25, WeightMigrationMode.PINNED)
    own = ballast.WeightStore(cluster.nats, default_policy=of_store)
    for generation, (at, given, expected) in enumerate([(own, None, of_store), (own, HOT, HOT), (store, None, WeightStoragePolicy())], 1):
        identity = publish(at, values, name, generation, policy=given)
        assert at.weight_get_metadata(identity).metadata.policy == expected
    with pytest.raises(ballast.InvalidArgumentError, match="WeightStoragePolicy"):
        ballast.WeightStore(cluster.nats, default_policy="HOT")


def test_the_public_surface_is_the_eleven_names():
    for store in (ballast.WeightStore, ballast.aio.WeightStore):
        assert sorted(name for name in dir(store) if not name.startswith("_")) == ELEVEN


def test_the_parameters_are_the_rfcs():
    def parameters(method):
        return list(inspect.signature(getattr(ballast.WeightStore, method)).parameters)[1:]

    assert parameters("weight_put") == ["snapshot", "adapter", "tenant_id", "policy"]
    assert parameters("weight_get") == [
        "identity", "target_placement", "target_bindings", "holder", "lease_ttl_ms", "target_allocation_guards"]
    assert parameters("weight_list") == ["namespace", "resource_id", "tenant_id", "page_token", "limit"]
    assert parameters("weight_update_policy") == ["identity", "policy", "expected_metadata_generation"]
    assert parameters("weight_upsert") == [
        "snapshot", "adapter", "replacing", "expected_metadata_generation", "mode", "tenant_id", "policy", "request_id"]
    assert parameters("weight_migrate") == ["identity", "target", "expected_metadata_generation", "mixed_hot_ratio"]
    assert parameters("weight_get_operation") == ["operation_id", "tenant_id"]
    assert parameters("weight_remove") == ["identity", "expected_metadata_generation"]
    for method in ("weight_is_exist", "weight_get_metadata", "weight_get_size"):
        assert parameters(method) == ["identity"]
    for method in ELEVEN:
        sync = inspect.signature(getattr(ballast.WeightStore, method))
        assert sync == inspect.signature(getattr(ballast.aio.WeightStore, method)), method


def test_enumerations_have_the_wire_numbers():
    assert [(member.name, member.value) for member in WeightAvailability] == [
        ("IMPORTING", 0), ("READY", 1), ("DEGRADED", 2), ("DELETING", 3), ("DELETED", 4)]
    assert [member.name for member in WeightResidencyState] == ["UNKNOWN", "HOT", "COLD", "MIXED", "ABSENT"]
    assert [member.name for member in WeightMigrationMode] == ["PINNED", "MANUAL", "AUTO"]
    assert [member.name for member in WeightUpsertMode] == ["PUT_FIRST", "DELETE_FIRST"]
    assert [member.name for member in ballast.WeightOperationKind][:2] == ["MIGRATING", "REPAIRING"]
    for kind in (WeightAvailability, WeightResidencyState, WeightMigrationMode, WeightUpsertMode):
        assert issubclass(kind, enum.IntEnum) and [member.value for member in kind] == list(range(len(kind)))
    assert [code.value for code in ballast.WeightErrorCode] == list(range(1, 15))


def test_every_error_code_has_a_class_of_its_own():
    classes = {
        value.code: value for value in vars(ballast).values()
        if isinstance(value, type) and issubclass(value, ballast.BallastError) and value.code
    }
    assert set(classes) == set(ballast.WeightErrorCode.__members__)
    assert len(set(classes.values())) == 14
    error = ballast.BusyError("in use", {"operation_id": "op-1.0"})
    assert (error.number, error.details["operation_id"], str(error)) == (6, "op-1.0", "BUSY: in use")


def test_the_example_of_the_rfc_runs_as_written(store, name):
    weight_store = store
    before, after = tensors(1), tensors(2)
    snapshot, next_snapshot = snapshot_of(before, name), snapshot_of(after, name, 2)
    adapter = None
    tensors_ = before.items()
    next_tensors = after.items()
    target_placement, target_bindings = None, {key: np.empty_like(value) for key, value in before.items()}
    new_policy = WeightStoragePolicy(migration_mode=WeightMigrationMode.MANUAL)

    # -- the RFC's text from here on; `at_rest` is the waiting for asynchronous convergence that it leaves open
    policy = WeightStoragePolicy(
        preferred_residency=WeightResidencyState.MIXED,
        mixed_hot_ratio=0.5,
        migration_mode=WeightMigrationMode.AUTO,
    )

    with weight_store.weight_put(snapshot, adapter, policy=policy) as writer:
        identity = writer.identity
        for tensor_id, tensor in tensors_:
            writer.weight_put_tensor(tensor_id, tensor)

    at_rest(weight_store, identity)
    view = weight_store.weight_get_metadata(identity)
    manifest = weight_store.weight_get(identity, target_placement, target_bindings)

    view = at_rest(weight_store, identity)
    updated = weight_store.weight_update_policy(
        identity,
        policy=new_policy,
        expected_metadata_generation=view.metadata.metadata_generation,
    )

    # The example migrates the base as well, which has to come before its replacement retires it.
    operation = weight_store.weight_migrate(
        identity,
        target=WeightResidencyState.COLD,
        expected_metadata_generation=updated.metadata_generation,
    )
    operation = weight_store.weight_get_operation(operation.operation_id)
    updated = at_rest(weight_store, identity).metadata

    with weight_store.weight_upsert(
        next_snapshot,
        adapter,
        replacing=identity,
        expected_metadata_generation=updated.metadata_generation,
        mode=WeightUpsertMode.PUT_FIRST,
        request_id="rollout-2026-09-11-001",
        policy=new_policy,
    ) as successor:
        for tensor_id, tensor in next_tensors:
            successor.weight_put_tensor(tensor_id, tensor)
        next_identity = successor.identity

    # -- and what must be true then
    assert manifest.identity == identity and list(manifest.tensors) == sorted(before)
    for key, value in before.items():
        assert np.array_equal(target_bindings[key], value), key
    assert operation.kind is ballast.WeightOperationKind.MIGRATING and operation.target is WeightResidencyState.COLD
    assert until(lambda: (done := weight_store.weight_get_operation(operation.operation_id)).done and done).message == "completed"
    assert next_identity.weight_generation == 2 and successor.replacement.request_id == "rollout-2026-09-11-001"
    assert until(lambda: weight_store.weight_get_metadata(identity).metadata.availability is WeightAvailability.DELETED)
    assert weight_store.weight_is_exist(next_identity) and not weight_store.weight_is_exist(identity)


def test_put_metadata_get_remove(store, name):
    values = tensors(3)
    identity = publish(store, values, name)
    view = store.weight_get_metadata(identity)
    assert (view.active_lease_count, view.nearest_lease_expiry_ms) == (0, None)
    record = view.metadata
    assert record.availability is WeightAvailability.READY and record.residency is WeightResidencyState.HOT
    assert record.policy == HOT and record.observed_hot_ratio == 1.0 and record.operation_id is None
    assert record.manifest.key == f"weights/default/{name}/main/1/manifest"
    assert record.manifest.group_id.startswith("weight:") and len(record.manifest.sha256) == 64
    assert record.affinity_count == len(values) and record.manifest.payload_count == len(values)
    size = sum(value.nbytes for value in values.values())
    assert store.weight_get_size(identity) == record.manifest.logical_bytes == size
    assert "READY HOT" in repr(record) and str(identity) == f"default/{name}@main#1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.residency = WeightResidencyState.COLD
    store.weight_remove(identity, expected_metadata_generation=record.metadata_generation)
    until(lambda: store.weight_get_metadata(identity).metadata.availability is WeightAvailability.DELETED)
    assert not store.weight_is_exist(identity)
    with pytest.raises(ballast.NotReadyError):
        store.weight_get(identity, None, {key: np.empty_like(value) for key, value in values.items()})


def test_what_is_not_there_is_not_found(store, name):
    identity = ballast.WeightRevisionIdentity("default", "default", name, "main", 1)
    assert store.weight_is_exist(identity) is False
    for ask in (store.weight_get_metadata, store.weight_get_size):
        with pytest.raises(ballast.NotFoundError) as missing:
            ask(identity)
        assert missing.value.number == 2 and name in missing.value.message
    with pytest.raises(ballast.NotFoundError):
        store.weight_get_operation("op-999999.0")
    with pytest.raises(ballast.NotFoundError):
        store.weight_get(identity, None, {})


def test_a_listing_comes_in_pages(store, name):
    for generation in (1, 2, 3):
        publish(store, {"w": np.full(4, generation, dtype=np.float32)}, name, generation)
    page = store.weight_list(namespace="default", resource_id=name, limit=2)
    assert [record.identity.weight_generation for record in page.revisions] == [1, 2] and page.next_page_token
    rest = store.weight_list(namespace="default", resource_id=name, limit=2, page_token=page.next_page_token)
    assert [record.identity.weight_generation for record in rest.revisions] == [3] and rest.next_page_token == ""
    for wrong in ({"limit": 0}, {"limit": 1001}, {"page_token": "nonsense"}):
        with pytest.raises(ballast.InvalidArgumentError):
            store.weight_list(namespace="default", resource_id=name, **wrong)


def test_a_stale_generation_changes_nothing(store, name):
    identity = publish(store, tensors(4), name)
    generation = store.weight_get_metadata(identity).metadata.metadata_generation
    other = WeightStoragePolicy(WeightResidencyState.HOT, 0.25, WeightMigrationMode.PINNED)
    with pytest.raises(ballast.StaleGenerationError):
        store.weight_update_policy(identity, policy=other, expected_metadata_generation=generation + 1)
    updated = store.weight_update_policy(identity, policy=other, expected_metadata_generation=generation)
    assert updated.policy == other and updated.metadata_generation == generation + 1
    # The same request again hears the same answer.
    again = store.weight_update_policy(identity, policy=other, expected_metadata_generation=generation)
    assert again.metadata_generation == updated.metadata_generation
    with pytest.raises(ballast.PolicyUnsatisfiableError):
        store.weight_migrate(identity, target="COLD", expected_metadata_generation=updated.metadata_generation)


def test_every_migration_keeps_the_bytes(store, name):
    values = tensors(5, scale=64)
    identity = publish(store, values, name)
    for target, ratio in (("COLD", None), ("MIXED", 0.3), ("HOT", None), ("MIXED", None), ("COLD", None)):
        generation = at_rest(store, identity).metadata.metadata_generation
        operation = store.weight_migrate(
            identity, target=WeightResidencyState[target], mixed_hot_ratio=ratio, expected_metadata_generation=generation)
        assert operation.target.name == target
        done = until(lambda: (now := store.weight_get_operation(operation.operation_id)).done and now)
        assert done.status is WeightOperationStatus.SUCCEEDED, done
        found = {key: np.empty_like(value) for key, value in values.items()}
        store.weight_get(identity, None, found)
        for key, value in values.items():
            assert np.array_equal(found[key], value), (target, key)
        assert store.weight_get_metadata(identity).metadata.residency.name == target
    with pytest.raises(ballast.InvalidArgumentError):
        store.weight_migrate(identity, target="HOT", mixed_hot_ratio=0.5, expected_metadata_generation=1)


def test_a_replacement_is_idempotent_and_alone(store, name):
    base = publish(store, tensors(6), name)
    generation = store.weight_get_metadata(base).metadata.metadata_generation
    after = tensors(7)
    arguments = dict(replacing=base, expected_metadata_generation=generation)
    for wrong, values in (
        ({"mode": 0}, snapshot_of(after, name, 2)), ({}, snapshot_of(after, name, 1)), ({}, snapshot_of(after, name + "x", 2)),
    ):
        with pytest.raises(ballast.InvalidArgumentError):
            store.weight_upsert(values, None, **{**arguments, **wrong})
    with pytest.raises(ballast.StaleGenerationError):
        store.weight_upsert(snapshot_of(after, name, 2), None, replacing=base, expected_metadata_generation=generation + 7)
    with ballast.open(base, store=store):  # keeps the base from being deleted at once
        for attempt in range(2):
            with store.weight_upsert(snapshot_of(after, name, 2), None, **arguments) as writer:
                for key, value in after.items():
                    writer.weight_put_tensor(key, value)
            assert writer.report["existed"] == bool(attempt)
        with pytest.raises((ballast.BusyError, ballast.ConflictError)):
            store.weight_upsert(snapshot_of(after, name, 3), None, request_id="another", **arguments)
    until(lambda: store.weight_get_metadata(base).metadata.availability is WeightAvailability.DELETED)


def test_delete_first_replaces_and_is_busy_while_the_base_is_read(store, name):
    base = publish(store, tensors(8), name)
    after = tensors(9)
    arguments = dict(
        replacing=base, mode=WeightUpsertMode.DELETE_FIRST,
        expected_metadata_generation=store.weight_get_metadata(base).metadata.metadata_generation)
    with ballast.open(base, store=store):
        with pytest.raises(ballast.BusyError):
            store.weight_upsert(snapshot_of(after, name, 2), None, **arguments)
    until(lambda: leases(store, base) == 0)
    with store.weight_upsert(snapshot_of(after, name, 2), None, **arguments) as writer:
        for key, value in after.items():
            writer.weight_put_tensor(key, value)
    assert store.weight_is_exist(writer.identity) and not store.weight_is_exist(base)


def test_the_same_put_again_finds_the_revision_and_another_is_a_conflict(store, name):
    values = tensors(10)
    first = publish(store, values, name)
    assert publish(store, values, name) == first
    changed = dict(values, **{"layer.0.bias": values["layer.0.bias"] + 1})
    with pytest.raises(ballast.ConflictError, match="layer.0.bias"):
        publish(store, changed, name)
    assert leases(store, first) == 0


def test_arguments_that_no_state_could_accept_are_refused_here(store, name):
    identity = ballast.WeightRevisionIdentity("default", "default", name, "main", 1)
    for wrong in (
        lambda: ballast.WeightRevisionIdentity("default", "", name, "main", 1),
        lambda: ballast.WeightRevisionIdentity("default", "default", name, "main", 0),
        lambda: ballast.WeightRevisionIdentity("_system", "default", name, "main", 1),
        lambda: ballast.WeightRevisionIdentity("default", "default", name, "main", True),
        lambda: ballast.WeightRevisionIdentity.parse(name),
        lambda: WeightStoragePolicy(mixed_hot_ratio=0),
        lambda: WeightStoragePolicy(mixed_hot_ratio=float("nan")),
        lambda: WeightStoragePolicy(preferred_residency=WeightResidencyState.ABSENT),
        lambda: store.weight_put({"w": 1}, None),
        lambda: store.weight_get_metadata(7),
        lambda: store.weight_get(identity, None, {}, lease_ttl_ms=0),
        lambda: store.weight_get(identity, "tp8", {}),
        lambda: store.weight_migrate(identity, target="LUKEWARM", expected_metadata_generation=1),
        lambda: store.weight_update_policy(identity, policy="HOT", expected_metadata_generation=1),
        lambda: store.weight_remove(identity, expected_metadata_generation=1.5),
    ):
        with pytest.raises(ballast.InvalidArgumentError):
            wrong()


def test_nobody_there_is_unavailable_and_says_what_to_start():
    lonely = ballast.WeightStore("nats://127.0.0.1:1", connect_seconds=0.2)
    with pytest.raises(ballast.UnavailableError, match="ballast dev") as error:
        lonely.weight_list(namespace="default", resource_id="m")
    assert error.value.is_retryable and isinstance(error.value, ConnectionError)
    assert "give the right address with nats= (or BALLAST_NATS)" in error.value.message and "--nats" not in error.value.message
