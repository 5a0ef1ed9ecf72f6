//! What stands in for RDMA in a build without it. None of these can be made.

use std::net::IpAddr;
use std::time::Duration;

use ballast_schemas::InstanceId;
use ballast_schemas::frame::{RdmaPeer, RemoteMemory, Response};

use super::NoRdma;
use crate::error::StoreError;
use crate::node_store::InstanceReader;

fn no_rdma() -> NoRdma {
    NoRdma::new("this build is without RDMA (cargo feature `rdma`)")
}

pub(crate) fn describe() -> Result<String, NoRdma> {
    Err(no_rdma())
}

/// Never returned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {}

#[derive(Debug)]
pub(crate) enum Link {}

impl Link {
    pub(crate) fn new(_address: IpAddr) -> Result<Self, NoRdma> {
        Err(no_rdma())
    }

    pub(crate) fn me(&self) -> RdmaPeer {
        match *self {}
    }

    pub(crate) fn connect(&mut self, _opened: &Response) -> Result<(), NoRdma> {
        match *self {}
    }

    pub(crate) fn has_window(&self) -> bool {
        match *self {}
    }

    pub(crate) fn read(&mut self, _round: Vec<(RemoteMemory, &mut [u8])>, _stall: Duration) -> Result<(), LinkError> {
        match *self {}
    }

    pub(crate) fn write(&mut self, _slot: u32, _pieces: &[&[u8]], _stall: Duration) -> Result<(), LinkError> {
        match *self {}
    }
}

pub(crate) fn rounds(reads: Vec<(RemoteMemory, &mut [u8])>) -> Vec<Vec<(RemoteMemory, &mut [u8])>> {
    vec![reads]
}

#[derive(Debug)]
pub(crate) enum Arena {}

impl Arena {
    pub(crate) fn copy_out(&self, _offset: u64, _buffer: &mut [u8]) -> std::io::Result<()> {
        match *self {}
    }
}

#[derive(Debug, Default)]
pub(crate) struct Service;

impl Service {
    pub(crate) fn open(
        &self,
        _addresses: (IpAddr, IpAddr),
        _instance: &InstanceId,
        _writable: bool,
        _peer: &RdmaPeer,
    ) -> Result<NodeLink, NoRdma> {
        Err(no_rdma())
    }
}

#[derive(Debug)]
pub(crate) enum NodeLink {}

impl NodeLink {
    pub(crate) fn opened(&self) -> Response {
        match *self {}
    }

    pub(crate) fn window(&self) -> Option<std::sync::Arc<Arena>> {
        match *self {}
    }

    pub(crate) fn locate(
        &mut self,
        _reader: &InstanceReader,
        _units: &[u32],
    ) -> Result<Vec<Option<RemoteMemory>>, StoreError> {
        match *self {}
    }
}
