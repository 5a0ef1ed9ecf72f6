//! A command happens once, however often and however late it comes: a repeat hears the first outcome or that it is too late,
//! and a lease that has ended never comes back.

use ballast_schemas::{Command, ErrorCode, Outcome};

use super::{Folded, Watch};
use crate::sim::world::W;

const NAME: &str = "once";

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    for (record, outcome) in folded.envelope.commands().iter().zip(folded.outcomes) {
        match &record.command {
            Command::Tick | Command::Barrier => {}
            Command::AcquireLease(command) if outcome.is_ok() && watch.ended.contains_key(&command.lease_id) => {
                w.violate(NAME, format!("lease {} came back after its end", command.lease_id));
            }
            command if command.family() == 9 => {}
            _ if is_too_late(outcome) => {}
            _ => {
                let first = watch.outcomes.entry(record.id.clone()).or_insert_with(|| outcome.clone());
                if first != outcome {
                    let again = format!("{} was decided twice: {first:?}, then {outcome:?}", record.id);
                    w.violate(NAME, again);
                }
            }
        }
    }
}

fn is_too_late(outcome: &Outcome) -> bool {
    outcome
        .as_ref()
        .is_err_and(|rejection| rejection.code == ErrorCode::Unavailable && rejection.message.starts_with("too late"))
}
