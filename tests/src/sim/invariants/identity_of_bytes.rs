//! The bytes of one import are never taken for those of another: a node answers for exactly the instance that was asked for.

use ballast_schemas::InstanceId;

use crate::sim::node::Node;
use crate::sim::world::W;

pub(crate) const NAME: &str = "identity of bytes";

pub(crate) fn identity_of_bytes(w: &W, node: &Node, asked: &InstanceId, found: &InstanceId) {
    if asked != found {
        w.violate(NAME, format!("{} was asked for {asked} and answers with {found}", node.id));
    }
}
