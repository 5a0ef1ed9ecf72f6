//! `ballast log`: entries of the log, each command with what folding it decided.

use std::collections::VecDeque;

use ballast_journal::{History, HistoryEntry};
use ballast_schemas::{BallastError, Command, CommandRecord, LogPosition, OperationId, Outcome};
use ballast_workflows::State;
use serde::Serialize;
use serde_json::Value;

use super::past::{self, failed};
use crate::args::{LogArgs, Name};
use crate::output::{Output, time};

const LAST_DEFAULT: u32 = 20;

/// One command as a document.
#[derive(Serialize)]
struct Line {
    seq: u64,
    index: u32,
    unix_ms: u64,
    log_clock_ms: Option<u64>,
    envelope_id: String,
    command_id: String,
    not_after_ms: u64,
    kind: String,
    command: Value,
    /// `null`: it can not be known.
    outcome: Option<Outcome>,
    #[serde(skip)]
    text: String,
}

pub async fn log(history: &History, args: LogArgs, out: Output) -> Result<(), BallastError> {
    let filter = Filter::of(&args)?;
    let bounds = history.bounds().await.map_err(failed)?;
    let is_narrowed = args.from.is_some() || args.to.is_some() || filter.is_some();
    let last = args.last.or((!is_narrowed).then_some(LAST_DEFAULT));
    let from = match (args.from, &filter, last) {
        (Some(from), _, _) => from,
        // Every entry holds a command or more (an empty one shows nothing, and the range is then a little short).
        (None, None, Some(last)) => args.to.unwrap_or(bounds.last_seq).saturating_sub(u64::from(last) - 1).max(1),
        (None, _, _) => 1,
    };
    if from > bounds.last_seq && !args.follow {
        return Err(failed(ballast_journal::HistoryError::Future { wanted: from, last: bounds.last_seq }));
    }
    if let Some(to) = args.to.filter(|to| *to < from) {
        return Err(BallastError::invalid(format!(
            "the range from entry {from} to {to} is empty; --to must not be before --from"
        )));
    }
    let to = args.to.unwrap_or(bounds.last_seq).min(bounds.last_seq);
    let mut walk = history.walk(from).await.map_err(failed)?;
    past::remarks(&walk, args.from, out);
    let mut kept: VecDeque<Line> = VecDeque::new();
    let mut at = walk.from().saturating_sub(1);
    while at < to {
        let entry = walk.next().await.map_err(failed)?;
        at = entry.seq;
        for line in lines(entry, walk.state(), filter.as_ref()) {
            match last {
                None => show(&line, out),
                Some(last) => {
                    kept.push_back(line);
                    if kept.len() > last as usize {
                        kept.pop_front();
                    }
                }
            }
        }
    }
    kept.iter().for_each(|line| show(line, out));
    if !args.follow {
        return Ok(());
    }
    loop {
        tokio::select! {
            entry = walk.next() => {
                let entry = entry.map_err(failed)?;
                lines(entry, walk.state(), filter.as_ref()).iter().for_each(|line| show(line, out));
            }
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

fn show(line: &Line, out: Output) {
    out.show(line, || line.text.clone());
}

fn lines(entry: HistoryEntry, state: Option<&State>, filter: Option<&Filter>) -> Vec<Line> {
    let HistoryEntry { seq, unix_ms, envelope, decided } = entry;
    let (outcomes, clock) = match decided {
        Some(decided) => (decided.outcomes, Some(decided.log_clock.0)),
        None => (Vec::new(), None),
    };
    let mut outcomes = outcomes.into_iter();
    let mut lines = Vec::new();
    for (index, record) in (0_u32..).zip(envelope.commands()) {
        let outcome = outcomes.next();
        if filter.is_some_and(|filter| !filter.takes(&record.command, outcome.as_ref(), state)) {
            continue;
        }
        let position = LogPosition { seq, index };
        let CommandRecord { id, not_after, command } = record;
        let (kind, fields) = past::parts(command);
        let (about, decided) = (past::about(command), past::decided(outcome.as_ref()));
        let sentence = if about.is_empty() { decided } else { format!("{about}: {decided}") };
        let text = format!("{}  {:>8}  {kind:22}  {sentence}", time(unix_ms), position.to_string());
        lines.push(Line {
            seq,
            index,
            unix_ms,
            log_clock_ms: clock,
            envelope_id: envelope.id().to_owned(),
            command_id: id.to_string(),
            not_after_ms: not_after.0,
            kind,
            command: fields,
            outcome,
            text,
        });
    }
    lines
}

/// Which commands are shown.
struct Filter {
    revision: Option<Name>,
    operation: Option<OperationId>,
}

impl Filter {
    fn of(args: &LogArgs) -> Result<Option<Self>, BallastError> {
        let operation = args.op.as_ref().map(|text| super::operations::operation_id(text)).transpose()?;
        let revision = args.revision.clone();
        Ok((revision.is_some() || operation.is_some()).then_some(Self { revision, operation }))
    }

    fn takes(&self, command: &Command, outcome: Option<&Outcome>, state: Option<&State>) -> bool {
        self.operation.as_ref().is_none_or(|wanted| names_operation(command, outcome, wanted))
            && self.revision.as_ref().is_none_or(|wanted| names_revision(command, state, wanted))
    }
}

/// A command is about an operation when it names it, or began it.
fn names_operation(command: &Command, outcome: Option<&Outcome>, wanted: &OperationId) -> bool {
    use ballast_schemas::Reply;
    let began = match outcome {
        Some(Ok(Reply::Operation(operation))) => Some(&operation.operation_id),
        Some(Ok(Reply::Revision(revision))) => revision.operation_id.as_ref(),
        Some(Ok(Reply::Claim(claim))) => Some(&claim.operation_id),
        _ => None,
    };
    command.operation().or(began) == Some(wanted)
}

/// A worker's command is about the revision of its operation.
fn names_revision(command: &Command, state: Option<&State>, wanted: &Name) -> bool {
    if let Command::AbortReplacement(abort) = command {
        return abort.lineage == wanted.lineage;
    }
    let of_operation = || command.operation().and_then(|id| state?.operation(id)).map(|found| &found.identity);
    command.revisions().into_iter().chain(of_operation()).any(|identity| wanted.means(identity))
}
