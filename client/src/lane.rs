//! One connection of an import to one of its nodes: made again when it is of no more use, under the newest token, and with the
//! base named on it that units are taken from.

use std::collections::HashSet;
use std::time::Duration;

use ballast_schemas::frame::{DerivedUnit, Description, OfferedFragment};
use ballast_schemas::{BallastError, Bitmap, ErrorCode, NodeEndpoint};
use ballast_transfer::{DeriveUnit, NodeConnection, Route};
use serde_json::json;

use crate::base::Base;
use crate::nodes::{Transport, connect, unreached};
use crate::session::ImportToken;

/// How often units of a delta are made until they are there, and after which pause when a node could not be reached.
const MAKE_TRIES: u32 = 4;
const MAKE_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// One connection to a node.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) connection: NodeConnection,
    /// How it was made, to make it again.
    endpoint: NodeEndpoint,
    token: ImportToken,
    /// The one that this connection goes on under.
    shown: String,
    route: Route,
    /// The run of the node's process that it began with.
    began_at: String,
    /// The base was named on it; and whether the node has it itself.
    base_is_here: Option<bool>,
}

impl Lane {
    pub(crate) async fn connect(
        endpoint: &NodeEndpoint,
        token: &ImportToken,
        route: Route,
    ) -> Result<Self, BallastError> {
        let shown = token.newest();
        let connection = connect(endpoint, &shown, route).await?;
        let began_at = connection.hello().incarnation.clone();
        let (endpoint, token) = (endpoint.clone(), token.clone());
        Ok(Self { connection, endpoint, token, shown, route, began_at, base_is_here: None })
    }

    /// Another one to the same node, for the same import.
    pub(crate) async fn another(&self) -> Result<Self, BallastError> {
        let another = Self::connect(&self.endpoint, &self.token, self.route).await?;
        Ok(Self { began_at: self.began_at.clone(), ..another })
    }

    /// Goes on over another connection if this one is of no more use, or the node has closed it, as it does when nothing was
    /// asked for long; and under the newest token.
    pub(crate) async fn keep_usable(&mut self) -> Result<(), BallastError> {
        if !self.connection.is_usable() || !self.connection.is_open() {
            let newest = self.token.newest();
            let again = connect(&self.endpoint, &newest, self.route).await;
            self.connection = again.map_err(unreached)?;
            (self.shown, self.base_is_here) = (newest, None);
        } else if !self.token.is(&self.shown) {
            let newest = self.token.newest();
            self.connection.renew(&newest).await?;
            self.shown = newest;
        }
        Ok(())
    }

    /// Why a node does not know an import that it has taken room for: its process is another one.
    pub(crate) fn explained(&self, error: BallastError) -> BallastError {
        let node = &self.endpoint.node;
        if error.code != ErrorCode::NotFound || self.connection.hello().incarnation == self.began_at {
            return error;
        }
        let message = format!(
            "node {node} was restarted since the import began, and what it had of it was in its memory alone until the commit; \
             put everything again: a part by another run that joins, a whole model under a new session"
        );
        BallastError::new(ErrorCode::Unavailable, message).with_details(json!({ "restarted_nodes": [node] }))
    }

    pub(crate) fn transport(&self) -> Transport {
        self.connection.transport().into()
    }

    pub(crate) async fn offer(&mut self, fragments: &[OfferedFragment]) -> Result<Bitmap, BallastError> {
        let offered = self.connection.offer(fragments).await;
        offered.map_err(|error| self.explained(error.into()))
    }

    pub(crate) async fn describe(&mut self) -> Result<Description, BallastError> {
        self.keep_usable().await?;
        let described = self.connection.describe().await;
        described.map_err(|error| self.explained(error.into()))
    }

    /// Names the base to the node, once; whether the node has it itself.
    async fn open(&mut self, base: &Base) -> Result<bool, BallastError> {
        if let Some(here) = self.base_is_here {
            return Ok(here);
        }
        let (token, holders) = base.door();
        let here = self.connection.open_base(&token, &holders).await?;
        self.base_is_here = Some(here);
        Ok(here)
    }

    async fn derive(
        &mut self,
        base: &Base,
        units: &[DeriveUnit<'_>],
        progress: impl FnMut(u64),
    ) -> Result<Vec<DerivedUnit>, BallastError> {
        let derived = self.connection.derive(units, progress).await?;
        base.check(units, &derived)?;
        Ok(derived)
    }

    /// Makes units that nobody can send. A copy of the base that is lost or wrong is no failure while there is another one.
    pub(crate) async fn make(
        &mut self,
        base: &Base,
        units: &[DeriveUnit<'_>],
        progress: impl Fn(u64),
    ) -> Result<Vec<DerivedUnit>, BallastError> {
        let (mut tries, mut told) = (MAKE_TRIES, 0);
        loop {
            let mut done = 0;
            // What is made again was told of before.
            let tell = |bytes| {
                done += bytes;
                progress(done.max(told) - told);
                told = told.max(done);
            };
            let made = match self.open(base).await {
                Ok(_) => self.derive(base, units, tell).await,
                Err(error) => Err(error),
            };
            let error = match made {
                Err(error) if tries > 1 => error,
                made => return made.map_err(|error| self.explained(error)),
            };
            tries -= 1;
            match error.code {
                // The node has given that copy up, or will not ask that holder for it any more.
                ErrorCode::ChecksumMismatch => {}
                ErrorCode::Unavailable | ErrorCode::Unauthorized => {
                    tokio::time::sleep(MAKE_AGAIN_AFTER).await;
                    base.renew_door().await?;
                    self.base_is_here = None;
                }
                _ => return Err(self.explained(error)),
            }
            tracing::debug!(%error, "units are made out of the base once more");
            self.keep_usable().await?;
        }
    }

    /// Which of the units the node has taken from the base. That the base can not be read is no failure: then they are sent, and
    /// it is not tried again.
    pub(crate) async fn reuse(&mut self, base: &Base, units: &[DeriveUnit<'_>]) -> Result<HashSet<u32>, BallastError> {
        if units.is_empty() || base.is_given_up() {
            return Ok(HashSet::new());
        }
        let derived = match self.open(base).await {
            // From one node to another bytes go no faster than from here, where they are in memory or in the page cache.
            Ok(false) if self.transport() == Transport::Local => {
                base.give_up();
                return Ok(HashSet::new());
            }
            Ok(_) => self.derive(base, units, |_| {}).await,
            Err(error) => {
                base.give_up();
                Err(error)
            }
        };
        let error = match derived {
            Ok(derived) => return Ok(derived.into_iter().filter(|unit| unit.same).map(|unit| unit.unit).collect()),
            Err(error) => error,
        };
        tracing::debug!(%error, "units of the base are sent after all");
        match error.code {
            // Of these units only.
            ErrorCode::InvalidArgument | ErrorCode::ChecksumMismatch => {}
            // Its token has ended.
            ErrorCode::Unauthorized if !base.is_given_up() && base.renew_door().await.is_ok() => {
                self.base_is_here = None;
            }
            _ => base.give_up(),
        }
        self.keep_usable().await?;
        Ok(HashSet::new())
    }
}
