"""What holds for a whole cluster: gates, the fold's version, settings, and where a service gets them from."""

import asyncio
import hashlib

import nats
import pytest

from cluster import wait_until

GATES = "weight_management_oplog_capability_confirmed", "weight_lineage_oplog_capability_confirmed"


def pack(value):
    """MessagePack of small maps, lists, texts and numbers."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value)]) + value.encode()
    return b"\xcf" + value.to_bytes(8, "big")


def append(site, command, envelope_id):
    """Appends one command to the log as another build would."""
    clock = site.cli.json("replay")["log_clock_ms"]
    body = pack({"id": envelope_id, "commands": [{"id": envelope_id, "not_after": clock + 60_000, "command": command}]})

    async def publish():
        connection = await nats.connect(site.cluster.url)
        try:
            payload = b"BLE\x01" + hashlib.sha256(body).digest() + body
            return (await connection.jetstream().publish("ballast.log.0", payload)).seq
        finally:
            await connection.close()

    return asyncio.run(publish())


def old_build(families):
    return {"AnnounceReplica": {"replica_id": "old-build", "families": families, "version": "0.0.1"}}


def test_a_gate_opens_only_when_every_live_replica_can_fold_what_it_opens(make_site, models):
    site = make_site(gateways=0, workflow_workers=0, transfer_workers=0)
    cluster = site.cluster
    gateway = cluster._service("gateway", "gateway", "--id", "gateway", "--set", f"{GATES[1]}=false")
    cluster.gateways.append(gateway)
    gateway.start()
    shown = site.cli.json("admin", "capabilities")
    assert {gate["capability"]: gate["confirmed"] for gate in shown["capabilities"]} == {
        "weight_management": True, "weight_lineage": False, "weight_sharing": True}
    announced = lambda: [one for one in site.cli.json("admin", "capabilities")["replicas"] if one["replica_id"] == "gateway"]
    mine = wait_until(announced, 20, "the gateway announces itself")[0]
    assert mine["live"] and set(mine["families"]) == {0, 8, 9, 10, 11, 12, 13} and mine["fold_version"] == 1

    append(site, old_build([0, 8, 9, 10, 11]), "old-1")
    code, error, _ = site.cli.refusal("admin", "confirm-capability", "weight_lineage")
    assert code == 15 and "old-build" in error["message"] and "family 12" in error["message"]
    code, error, _ = site.cli.refusal("admin", "raise-fold-version", "2")
    assert code == 15 and "fold versions up to 1" in error["message"]
    append(site, old_build([0, 8, 9, 10, 11, 12]), "old-2")
    opened = site.cli.json("admin", "confirm-capability", "weight_lineage")
    assert all(gate["confirmed"] for gate in opened["capabilities"])
    assert "weight_lineage" in site.cli.text("admin", "capabilities")
    assert gateway.stop() == 0


def test_until_its_gate_is_open_a_family_is_refused_by_the_name_of_its_flag(make_site, models):
    site = make_site(gateways=0, workflow_workers=0, transfer_workers=0)
    gateway = site.cluster._service("gateway", "gateway", "--set", f"{GATES[0]}=false")
    site.cluster.gateways.append(gateway)
    gateway.start()
    lease = {"identity": {"tenant_id": "default", "namespace": "n", "resource_id": "r", "revision": "main", "weight_generation": 1}, "lease_id": "l"}
    with pytest.raises(Exception, match="weight_management"):
        site.verbs.call("acquire_lease", lease)
    site.cli.json("admin", "confirm-capability", "weight_management")
    with pytest.raises(Exception, match="NOT_FOUND"):
        site.verbs.call("acquire_lease", lease)


def test_settings_come_from_flag_environment_and_file_and_are_changed_for_everyone(make_site, scratch):
    file = scratch / "ballast.yaml"
    file.write_text('default_weight_preferred_residency: "hot"\ndefault_weight_migration_mode: manual\n'
                    "weight_migration_cooldown_ms: 1\nweight_migration_max_members_per_round: 1\n")
    site = make_site(gateways=0, workflow_workers=0, transfer_workers=0)
    gateway = site.cluster._service("gateway", "gateway", "--config", file, "--set", "weight_migration_cooldown_ms=3",
                                    env={"BALLAST_WEIGHT_MIGRATION_COOLDOWN_MS": "2", "BALLAST_WEIGHT_MIGRATION_MAX_MEMBERS_PER_ROUND": "2"})
    site.cluster.gateways.append(gateway)
    gateway.start()
    config = site.cli.json("admin", "config")
    assert config["default_weight_preferred_residency"] == "hot" and config["default_weight_migration_mode"] == "manual"
    assert config["weight_migration_cooldown_ms"] == 3 and config["weight_migration_max_members_per_round"] == 2
    assert "keeps its own settings" not in gateway.output()

    changed = site.cli.json("admin", "config", "set", "weight_migration_cooldown_ms=9", "default_weight_mixed_hot_ratio=0.25")
    assert changed == {**config, "weight_migration_cooldown_ms": 9, "default_weight_mixed_hot_ratio": 0.25}
    for wrong, said in (("weight_migration_max_bytes_per_round=0", "at least 1"), ("weight_migration_coldown_ms=1", "weight_migration_cooldown_ms"),
                        (f"{GATES[0]}=false", "confirm-capability")):
        code, error, _ = site.cli.refusal("admin", "config", "set", wrong)
        assert code == 11 and wrong.split("=")[0] in error["message"] and said in error["message"]
    assert site.cli.json("admin", "config") == changed

    # What the commands print is a configuration file.
    printed = scratch / "printed.yaml"
    printed.write_text(site.cli.text("admin", "config"))
    gateway.stop()
    gateway.command = gateway.command[:gateway.command.index("--config")] + ["--config", str(printed), "--set", "weight_migration_cooldown_ms=4"]
    gateway.env = {}
    gateway.start()
    told = [line for line in gateway.output().splitlines() if "keeps its own settings" in line]
    assert len(told) == 1 and "weight_migration_cooldown_ms is 9 here, not 4" in told[0] and "max_members" not in told[0]
    assert site.cli.json("admin", "config") == changed, "a start changes nothing"


@pytest.mark.parametrize("content, words", [
    ("weight_migration_max_bytes_per_round: 0\n", ("weight_migration_max_bytes_per_round", "is 0", "at least 1")),
    ("default_weight_mixed_hot_ratio: 1.0\n", ("default_weight_mixed_hot_ratio", "above 0 and below 1")),
    ("default_weight_migration_mode: sometimes\n", ("default_weight_migration_mode", "sometimes", "pinned, manual or auto")),
    ("weight_speed: 3\n", ("weight_speed", "weight_migration_cooldown_ms")),
    ("just text\n", ("wrong",)),
])
def test_a_wrong_configuration_file_is_refused_at_start(site, scratch, content, words):
    file = scratch / "ballast.yaml"
    file.write_text(content)
    code, error, _ = site.cli.refusal("gateway", "--config", file)
    assert code == 11
    for word in (*words, str(file)):
        assert word in error["message"], word


def test_a_put_that_says_half_of_its_policy_gets_the_rest_from_the_cluster_or_from_what_it_replaces(make_site, models, fresh):
    site = make_site()
    site.cli.json("admin", "config", "set", "default_weight_preferred_residency=hot", "default_weight_migration_mode=manual")

    def policy(*arguments):
        return site.cli.json("put", models("plain"), *arguments)["metadata"]["policy"]

    name = fresh()["resource_id"]
    assert policy(fresh()["resource_id"]) == {"preferred_residency": "HOT", "mixed_hot_ratio": 0.5, "migration_mode": "MANUAL"}
    assert policy(name, "--hot-ratio", "0.3") == {"preferred_residency": "HOT", "mixed_hot_ratio": 0.3, "migration_mode": "MANUAL"}
    replaced = policy(name, "--replace", "--mode", "pinned")
    assert replaced == {"preferred_residency": "HOT", "mixed_hot_ratio": 0.3, "migration_mode": "PINNED"}
