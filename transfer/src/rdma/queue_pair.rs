//! A reliable connection between two queue pairs, and one-sided requests on it: posting, waiting for completion events with a
//! deadline, and the end, after which no device touches what requests named.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{RdmaPeer, RemoteMemory};
use ibverbs_sys as ffi;
use ibverbs_sys::ibv_access_flags as flags;
use ibverbs_sys::ibv_qp_attr_mask as mask;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::device::{Domain, Place, check};
use super::memory::Stretch;

/// Requests under way on one queue pair.
pub(crate) const DEPTH: u32 = 32;
/// What a peer that does not answer costs: 4.096 us * 2^14 for each of seven tries, half a second in all. Seven retries would be
/// no limit on some devices, so that a dead peer were never noticed.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 6;
/// How long requests may take to be given back once their queue pair has failed.
const FLUSH_WAIT: Duration = Duration::from_secs(2);

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Fills local memory from the peer's.
    Read,
    /// Fills the peer's memory from local.
    Write,
}

/// What the peer may do with regions of the queue pair's domain, as far as each of them allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerMay {
    /// Nothing: this end asks, and serves nothing.
    Nothing,
    /// Read.
    Read,
    /// Read and write.
    Write,
}

/// Why requests failed. The queue pair is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// The peer let nobody reach that memory (any more).
    #[error("the peer gave no access to its memory, or took it back")]
    NoAccess,
    /// The peer's queue pair is gone, or nothing leads there.
    #[error("the peer does not answer over RDMA")]
    NoAnswer,
    /// Nothing moved for too long.
    #[error("nothing moved over RDMA for {} ms", .0.as_millis())]
    Stalled(Duration),
    /// Something else.
    #[error("a request over RDMA ended with status {0}")]
    Status(u32),
    /// The system refused.
    #[error("RDMA failed: {0}")]
    Io(#[from] io::Error),
}

/// A queue pair with its completion queue.
pub(crate) struct QueuePair {
    /// `None` once it had to be given up.
    pair: Option<NonNull<ffi::ibv_qp>>,
    queue: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    place: Place,
    /// What the peer is told.
    me: RdmaPeer,
    /// Requests posted and not given back.
    under_way: u32,
    domain: Arc<Domain>,
}

// SAFETY: a queue pair is used by one thread at a time (`&mut self`), from whichever.
unsafe impl Send for QueuePair {}
// SAFETY: what takes `&self` only reads plain fields.
unsafe impl Sync for QueuePair {}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("me", &self.me).finish_non_exhaustive()
    }
}

impl QueuePair {
    /// A queue pair that is not connected yet.
    pub(crate) fn new(domain: &Arc<Domain>, place: &Place, peer_may: PeerMay) -> io::Result<Self> {
        let device = domain.device();
        let context = device.context().as_ptr();
        let missing = || Err(io::Error::last_os_error());
        // SAFETY: the context is open for as long as the domain lives, which holds its device.
        let channel = unsafe { ffi::ibv_create_comp_channel(context) };
        let Some(channel) = NonNull::new(channel) else { return missing() };
        // SAFETY: context and channel live; the context value is not used.
        let queue = unsafe { ffi::ibv_create_cq(context, DEPTH as c_int, std::ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(queue) = NonNull::new(queue) else {
            let failed = missing();
            // SAFETY: nothing else knows the channel.
            unsafe { ffi::ibv_destroy_comp_channel(channel.as_ptr()) };
            return failed;
        };
        let mut wanted = ffi::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: queue.as_ptr(),
            recv_cq: queue.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: DEPTH,
                max_recv_wr: 1,
                max_send_sge: device.pieces_max as u32,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue live.
        let pair = unsafe { ffi::ibv_create_qp(domain.as_ptr(), &mut wanted) };
        let Some(pair) = NonNull::new(pair) else {
            let failed = missing();
            // SAFETY: nothing else knows queue and channel.
            unsafe {
                ffi::ibv_destroy_cq(queue.as_ptr());
                ffi::ibv_destroy_comp_channel(channel.as_ptr());
            }
            return failed;
        };
        // SAFETY: the pair was just made; its number does not change.
        let number = unsafe { (*pair.as_ptr()).qp_num };
        let me = RdmaPeer {
            queue_pair: number,
            first_packet: rand_packet(),
            gid: place.gid,
            mtu_log2: device.mtu_log2(place.port).unwrap_or(10),
            reads_max: device.reads_in_max,
        };
        let (place, domain) = (place.clone(), domain.clone());
        // From here on everything is given back by `drop`.
        let made = Self { pair: Some(pair), queue, channel, place, me, under_way: 0, domain };
        rustix::io::ioctl_fionbio(made.events(), true)?;
        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            port_num: made.place.port,
            qp_access_flags: match peer_may {
                PeerMay::Nothing => 0,
                PeerMay::Read => flags::IBV_ACCESS_REMOTE_READ.0,
                PeerMay::Write => flags::IBV_ACCESS_REMOTE_READ.0 | flags::IBV_ACCESS_REMOTE_WRITE.0,
            },
            ..Default::default()
        };
        let what = mask::IBV_QP_STATE.0 | mask::IBV_QP_PKEY_INDEX.0 | mask::IBV_QP_PORT.0 | mask::IBV_QP_ACCESS_FLAGS.0;
        made.modify(&mut attributes, what)?;
        Ok(made)
    }

    /// What the peer connects to.
    pub(crate) fn me(&self) -> RdmaPeer {
        self.me
    }

    /// Connects to a peer's queue pair. What the peer says of itself only decides whether anything arrives.
    pub(crate) fn connect(&mut self, peer: &RdmaPeer) -> io::Result<()> {
        let mtu = self.me.mtu_log2.min(peer.mtu_log2).clamp(8, 12) - 7;
        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: mtu.into(),
            dest_qp_num: peer.queue_pair & 0xff_ffff,
            rq_psn: peer.first_packet & 0xff_ffff,
            max_dest_rd_atomic: self.domain.device().reads_in_max,
            min_rnr_timer: 12,
            ah_attr: ffi::ibv_ah_attr {
                grh: ffi::ibv_global_route {
                    dgid: ffi::ibv_gid { raw: peer.gid },
                    sgid_index: self.place.gid_index,
                    hop_limit: 64,
                    ..Default::default()
                },
                is_global: 1,
                port_num: self.place.port,
                ..Default::default()
            },
            ..Default::default()
        };
        let what = mask::IBV_QP_STATE.0
            | mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0;
        self.modify(&mut attributes, what)?;
        let mut attributes = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            sq_psn: self.me.first_packet,
            max_rd_atomic: self.domain.device().reads_out_max.min(peer.reads_max).max(1),
            ..Default::default()
        };
        let what = mask::IBV_QP_STATE.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify(&mut attributes, what)
    }

    fn modify(&self, attributes: &mut ffi::ibv_qp_attr, what: u32) -> io::Result<()> {
        // SAFETY: the pair lives for as long as it is there.
        check(unsafe { ffi::ibv_modify_qp(self.pair()?, attributes, what as c_int) })
    }

    fn pair(&self) -> io::Result<*mut ffi::ibv_qp> {
        self.pair.map(NonNull::as_ptr).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// How many more requests may be posted.
    pub(crate) fn room(&self) -> u32 {
        DEPTH - self.under_way
    }

    pub(crate) fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Posts a request: from or into local stretches, one after the other.
    ///
    /// # Safety
    /// The stretches must stay registered, and nobody may touch their bytes (of a READ) or change them (of a WRITE), until
    /// [`QueuePair::wait`] has given the request back or [`QueuePair::end`] has returned.
    pub(crate) unsafe fn post(&mut self, verb: Verb, local: &[Stretch], remote: RemoteMemory) -> Result<(), LinkError> {
        let entry = |stretch: &Stretch| {
            let length = u32::try_from(stretch.bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            Ok(ffi::ibv_sge { addr: stretch.address, length, lkey: stretch.key })
        };
        let mut entries: Vec<ffi::ibv_sge> = local.iter().map(entry).collect::<io::Result<_>>()?;
        let opcode = match verb {
            Verb::Read => ffi::ibv_wr_opcode::IBV_WR_RDMA_READ,
            Verb::Write => ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        };
        let mut request = ffi::ibv_send_wr {
            sg_list: entries.as_mut_ptr(),
            num_sge: entries.len() as c_int,
            opcode,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            wr: ffi::ibv_send_wr__bindgen_ty_2 {
                rdma: ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.address, rkey: remote.key },
            },
            ..Default::default()
        };
        let mut refused = std::ptr::null_mut();
        let pair = self.pair()?;
        // SAFETY: the pair and its context live. Request and entries are copied by the call; what they name is the caller's
        // matter.
        let posted = unsafe {
            let post = (*(*pair).context).ops.post_send.ok_or(io::Error::from(io::ErrorKind::Unsupported))?;
            check(post(pair, &mut request, &mut refused))
        };
        posted?;
        self.under_way += 1;
        Ok(())
    }

    /// Waits until at least one request is given back.
    pub(crate) fn wait(&mut self, stall: Duration) -> Result<(), LinkError> {
        let deadline = Instant::now() + stall;
        loop {
            if self.take_back()? {
                return Ok(());
            }
            self.ask_for_event()?;
            // What ended before that call makes no event.
            if self.take_back()? {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LinkError::Stalled(stall));
            }
            self.sleep(left)?;
        }
    }

    /// Takes back what has ended; whether anything has.
    fn take_back(&mut self) -> Result<bool, LinkError> {
        const AT_ONCE: usize = 16;
        let mut ended = [ffi::ibv_wc::default(); AT_ONCE];
        let queue = self.queue.as_ptr();
        // SAFETY: the queue and its context live, and the answer has room for as many as are asked for.
        let count = unsafe {
            let poll = (*(*queue).context).ops.poll_cq.ok_or(io::Error::from(io::ErrorKind::Unsupported))?;
            poll(queue, AT_ONCE as c_int, ended.as_mut_ptr())
        };
        let count = usize::try_from(count).map_err(|_| io::Error::other("a completion queue can not be read"))?;
        let ended = &ended[..count.min(AT_ONCE)];
        self.under_way = self.under_way.saturating_sub(ended.len() as u32);
        match ended.iter().find_map(|request| request.error()) {
            None => Ok(!ended.is_empty()),
            Some((status, _)) => Err(match status {
                ffi::ibv_wc_status::IBV_WC_REM_ACCESS_ERR => LinkError::NoAccess,
                ffi::ibv_wc_status::IBV_WC_RETRY_EXC_ERR => LinkError::NoAnswer,
                other => LinkError::Status(other),
            }),
        }
    }

    fn ask_for_event(&mut self) -> io::Result<()> {
        let queue = self.queue.as_ptr();
        // SAFETY: the queue and its context live.
        unsafe {
            let ask = (*(*queue).context).ops.req_notify_cq.ok_or(io::Error::from(io::ErrorKind::Unsupported))?;
            check(ask(queue, 0))
        }
    }

    /// The descriptor that becomes readable when a request ends.
    fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and so its descriptor, lives until `drop`.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    fn sleep(&mut self, wait: Duration) -> io::Result<()> {
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(self.events(), PollFlags::IN)], Some(&wait)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives; it does not block, because that was set in `new`.
        if unsafe { ffi::ibv_get_cq_event(self.channel.as_ptr(), &mut queue, &mut context) } == 0 {
            // SAFETY: the event came from this queue, the only one of the channel.
            unsafe { ffi::ibv_ack_cq_events(self.queue.as_ptr(), 1) };
        }
        Ok(())
    }

    /// Ends every request: afterwards no device touches what they named.
    pub(crate) fn end(&mut self) {
        if self.under_way == 0 {
            return;
        }
        let mut attributes = ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        if let Err(error) = self.modify(&mut attributes, mask::IBV_QP_STATE.0) {
            tracing::warn!(%error, "a queue pair can not be failed");
        }
        let deadline = Instant::now() + FLUSH_WAIT;
        while self.under_way > 0 {
            // Each is given back as failed.
            if let Err(LinkError::Io(error)) = self.take_back() {
                tracing::warn!(%error, "requests of a failed queue pair are not given back");
                break;
            }
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.under_way > 0 {
            self.give_up_pair();
            self.under_way = 0;
        }
    }

    fn give_up_pair(&mut self) {
        let Some(pair) = self.pair.take() else { return };
        // SAFETY: it was made in `new`, and is known to nobody any more.
        if let Err(error) = check(unsafe { ffi::ibv_destroy_qp(pair.as_ptr()) }) {
            tracing::error!(%error, "a queue pair can not be given up");
            if self.under_way > 0 {
                // The memory of its requests is the caller's again after this, and a device may still write it.
                std::process::abort();
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.end();
        self.give_up_pair();
        // SAFETY: both were made in `new`, and are given up here alone, each after what uses it.
        let gone = unsafe {
            check(ffi::ibv_destroy_cq(self.queue.as_ptr()))
                .and_then(|()| check(ffi::ibv_destroy_comp_channel(self.channel.as_ptr())))
        };
        if let Err(error) = gone {
            tracing::error!(%error, "a completion queue can not be given up");
        }
    }
}

/// A number that no late packet of an earlier connection is likely to have.
fn rand_packet() -> u32 {
    uuid::Uuid::new_v4().as_u128() as u32 & 0xff_ffff
}
