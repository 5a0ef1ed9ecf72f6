//! A workflow worker as the real one drives operations, and what can go wrong around each of its steps.

use ballast_schemas::*;
use ballast_workflows::{Observation, Step, after_failure, next_step};

use super::World;

/// What can go wrong around one step of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mishap {
    #[default]
    None,
    /// The worker forgets everything.
    Crash,
    /// The step happens, its answer is lost.
    LostReply,
    /// The step happens twice.
    Twice,
    /// The step happens, and once more much later.
    Echo,
    /// The step happens much later; the worker takes it for failed.
    Late,
}

/// Something on its way that arrives late.
#[derive(Clone, Debug)]
pub enum InFlight {
    Request(NodeId, NodeRequest),
    Command(Box<CommandRecord>),
}

#[derive(Debug)]
struct Job {
    operation: OperationId,
    epoch: u64,
    seen: Option<Observation>,
    last: Option<Step>,
}

/// A workflow worker.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    job: Option<Job>,
}

impl Worker {
    pub fn new(name: &str) -> Self {
        Self { id: WorkerId::new(name).unwrap(), job: None }
    }

    pub fn is_idle(&self) -> bool {
        self.job.is_none()
    }

    pub fn forget(&mut self) {
        self.job = None;
    }

    /// What it is at.
    pub fn operation(&self) -> Option<&OperationId> {
        self.job.as_ref().map(|job| &job.operation)
    }

    pub fn claim(&mut self, world: &mut World, operation: &OperationId) -> bool {
        let command = ClaimOperation { operation_id: operation.clone(), worker: self.id.clone(), ttl_ms: CLAIM_TTL_MS };
        match world.append(Command::ClaimOperation(command)) {
            Ok(Reply::Operation(claimed)) => {
                self.job = Some(Job { operation: operation.clone(), epoch: claimed.epoch, seen: None, last: None });
                true
            }
            _ => false,
        }
    }

    /// One step of its operation, or of a runnable one. `false` when there is nothing to do.
    pub fn step(&mut self, world: &mut World, mishap: Mishap) -> Option<InFlight> {
        if mishap == Mishap::Crash {
            self.job = None;
            return None;
        }
        let job = self.job.as_mut()?;
        let step = next_step(&world.state, job.seen.as_ref(), &job.operation, job.epoch);
        let stuck = job.last.as_ref() == Some(&step);
        job.last = Some(step.clone());
        if stuck {
            let error =
                BallastError::new(ErrorCode::DurabilityFailed, format!("asked for twice without effect: {step:?}"));
            self.fail(world, None, &error);
            return None;
        }
        match step {
            Step::Done => self.job = None,
            Step::NeedIndex { instance } => match observe(world, &instance) {
                Ok(seen) => job.seen = Some(seen),
                Err(error) => self.fail(world, None, &error),
            },
            Step::Effect { node, request } => {
                if mishap == Mishap::Late {
                    let error = BallastError::new(ErrorCode::Unavailable, "no answer");
                    self.fail(world, Some(&request), &error);
                    return Some(InFlight::Request(node, request));
                }
                let mut reply = world.ask(&node, &request);
                if mishap == Mishap::Twice {
                    reply = world.ask(&node, &request);
                }
                let echo = (mishap == Mishap::Echo).then(|| InFlight::Request(node.clone(), request.clone()));
                if mishap == Mishap::LostReply {
                    reply = NodeReply::Failed(BallastError::new(ErrorCode::Unavailable, "no answer"));
                }
                match &reply {
                    NodeReply::Failed(error) => self.fail(world, Some(&request), error),
                    reply => {
                        if let Some(seen) = &mut job.seen {
                            seen.answered(&node, reply);
                        }
                    }
                }
                return echo;
            }
            Step::Append(command) => {
                let record = world.record(command);
                match mishap {
                    Mishap::Late => return Some(InFlight::Command(Box::new(record))),
                    Mishap::Twice => {
                        // The same command once more under another id, as a worker that lost the answer would.
                        world.append_records(vec![record.clone()]);
                        let _ = world.append(record.command);
                    }
                    Mishap::Echo => {
                        let again = CommandRecord {
                            id: CommandId::new(format!("{}-again", record.id)).unwrap(),
                            ..record.clone()
                        };
                        world.append_records(vec![record]);
                        return Some(InFlight::Command(Box::new(again)));
                    }
                    _ => drop(world.append_records(vec![record])),
                }
            }
        }
        None
    }

    fn fail(&mut self, world: &mut World, request: Option<&NodeRequest>, error: &BallastError) {
        let Some(job) = self.job.take() else { return };
        let operation = world.operation(&job.operation);
        let command = after_failure(&operation, job.epoch, request, error);
        // Refused when the claim is lost, and then there is nothing to report.
        let _ = world.append(command);
    }
}

fn observe(world: &mut World, instance: &InstanceId) -> Result<Observation, BallastError> {
    let nodes: Vec<NodeId> = world.nodes.keys().cloned().collect();
    let mut inventory = GroupInventory::default();
    let mut index = None;
    for node in nodes {
        match world.ask(&node, &NodeRequest::Inventory { instance: instance.clone() }) {
            NodeReply::Inventory(found) => {
                inventory.nodes.insert(node.clone(), *found);
                if let NodeReply::AffinityIndex(found) =
                    world.ask(&node, &NodeRequest::AffinityIndex { instance: instance.clone() })
                {
                    index = Some(*found);
                }
            }
            NodeReply::Failed(error) => return Err(error),
            _ => {}
        }
    }
    let cold_nodes = world.nodes.iter().filter(|(_, fake)| fake.cold_tier).map(|(node, _)| node.clone()).collect();
    Ok(Observation::new(instance.clone(), inventory, index, cold_nodes))
}

/// Lets one worker drive everything that is runnable, letting time pass when nothing is, until nothing changes any more.
pub fn settle(world: &mut World, worker: &mut Worker) {
    let mut quiet = 0;
    for _ in 0..200_000 {
        if worker.is_idle() {
            let next = world.state.runnable_operations().next().map(|operation| operation.operation_id.clone());
            match next {
                Some(operation) => {
                    quiet = 0;
                    worker.claim(world, &operation);
                }
                // Back-offs and park timers are at most half a minute.
                None if quiet < 40 => {
                    quiet += 1;
                    world.pass(1_000);
                }
                None => return,
            }
        } else {
            worker.step(world, Mishap::None);
        }
    }
    panic!("never settles: {:?}", world.state.operations(&TenantId::default_tenant(), false, 10));
}
