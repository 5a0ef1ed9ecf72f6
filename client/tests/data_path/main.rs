//! Puts and gets through a real NATS server and a real node, with a gateway that can be told what to answer.

mod cluster;
mod coordinating;
mod deriving;
mod events;
mod getting;
mod putting;
mod replacing;
mod requests;
mod sharing;
