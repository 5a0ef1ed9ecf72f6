//! The node "dies" at every step of every effect: each change of a file or folder is such a step. What a restart finds
//! must be right, and the effect must be repeatable.

use ballast_schemas::InstanceId;

use super::tests::{SIZES, check_readable, delete, release, to_cold, to_memory};
use super::{Adoption, NodeStore};
use crate::folder::crash;
use crate::testing::*;

/// What a crash at any step of an effect must leave: nothing lost that was readable, nothing wrong handed out.
fn crash_at_every_step(
    name: &str,
    prepare: impl Fn(&NodeStore, &InstanceId),
    act: impl Fn(&NodeStore, &InstanceId) -> bool,
) {
    let id = instance(1);
    for steps in 0.. {
        assert!(steps < 500, "{name} never ends");
        let folders = Folders::new();
        let store = folders.open();
        import(&store, &id, &SIZES);
        prepare(&store, &id);
        let before = check_readable(&store, &id, &SIZES);
        crash::die_after(Some(steps));
        let done = act(&store, &id);
        let died = crash::is_dead();
        // What a failed effect leaves is served on by the same process too.
        crash::die_after(None);
        assert!(done || died, "{name} failed without a crash");
        drop(store);

        let store = folders.reopen();
        let Adoption { wrong_units, lost_units, damaged, .. } = store.adoption();
        let honest = *wrong_units == 0 && *lost_units == 0 && damaged.is_empty();
        assert!(honest, "{name} at step {steps}: records speak of bytes that are not there: {:?}", store.adoption());
        if let Some(after) = store.inventory(&id).unwrap().filter(|after| after.manifest) {
            let after_read = check_readable(&store, &id, &SIZES);
            assert_eq!(after, after_read);
            for unit in 0..SIZES.len() as u32 {
                let readable = after.hot.get(unit) || after.cold.get(unit);
                assert!(readable, "{name} at step {steps}: unit {unit} is lost");
            }
            assert!(after.fence >= before.fence, "{name} at step {steps}: the fence went back");
        } else {
            assert!(name.starts_with("delete"), "{name} at step {steps}: the instance is lost");
        }
        assert!(act(&store, &id), "{name} at step {steps} can not be repeated");
        if !died {
            println!("{name}: {steps} steps");
            return;
        }
    }
}

#[test]
fn a_crash_at_any_step_of_a_copy_to_disk_loses_nothing() {
    crash_at_every_step("copy to cold", |_, _| {}, |store, id| to_cold(store, id, 4, 0..5).is_ok());
}

#[test]
fn a_crash_at_any_step_of_a_release_loses_nothing() {
    let prepare = |store: &NodeStore, id: &InstanceId| drop(to_cold(store, id, 2, 0..5).unwrap());
    crash_at_every_step("release", prepare, |store, id| release(store, id, 4, 0..5).is_ok());
}

#[test]
fn a_crash_at_any_step_of_a_promotion_loses_nothing() {
    let prepare = |store: &NodeStore, id: &InstanceId| {
        to_cold(store, id, 2, 0..5).unwrap();
        release(store, id, 2, 0..5).unwrap();
    };
    crash_at_every_step("copy to memory", prepare, |store, id| to_memory(store, id, 4, 0..5).is_ok());
}

#[test]
fn a_crash_at_any_step_of_a_deletion_can_be_gone_on_from() {
    let prepare = |store: &NodeStore, id: &InstanceId| drop(to_cold(store, id, 2, 0..5).unwrap());
    crash_at_every_step("delete units", prepare, |store, id| {
        delete(store, id, 4, 0..3).is_ok()
            && delete(store, id, 4, 3..5).is_ok()
            && store.delete_instance(id, at(4), &crate::Progress::default()).is_ok()
    });
}

#[test]
fn a_crash_at_any_step_of_a_seal_leaves_all_or_nothing() {
    let id = instance(1);
    for steps in 0.. {
        let folders = Folders::new();
        let store = folders.open();
        store.allocate(&id, &session(), &SIZES).unwrap();
        for (unit, &bytes) in SIZES.iter().enumerate() {
            store.write(&id, &session(), unit as u32, 0, &content(unit as u32, bytes)).unwrap();
        }
        crash::die_after(Some(steps));
        let sealed = seal(&store, &id, &SIZES);
        let died = crash::is_dead();
        crash::die_after(None);
        if steps % 2 == 0 {
            // The process lives on after a failure: the seal is repeated.
            seal(&store, &id, &SIZES).unwrap();
            check_readable(&store, &id, &SIZES);
        }
        drop(store);
        let store = folders.reopen();
        assert!(store.adoption().damaged.is_empty(), "step {steps}: {:?}", store.adoption());
        match store.receipt(&id, &session()) {
            Ok(_) => assert!(check_readable(&store, &id, &SIZES).hot.is_full(), "step {steps}"),
            Err(error) => {
                assert!(sealed.is_err() && steps % 2 == 1, "step {steps}: a given receipt was lost: {error}");
                store.delete_instance(&id, at(9), &crate::Progress::default()).unwrap();
            }
        }
        if !died {
            assert!(sealed.is_ok());
            return;
        }
    }
}
