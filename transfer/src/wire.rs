//! Frames on a socket, both ends: reading and writing with a deadline that progress resets, and descriptors that travel
//! with Unix-socket frames. What frames mean is the server's and the client's matter.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ballast_schemas::frame::{DESCRIPTORS_MAX, HEADER_BYTES_MAX};
use bytes::{Buf, BytesMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};

/// Bytes read ahead, so that a header does not cost several system calls.
const AHEAD_BYTES: usize = 64 << 10;

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// The peer closed the connection between two frames.
    #[error("the peer closed the connection")]
    Closed,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(io::Error),
    /// Nothing moved for too long.
    #[error("the peer did not move for {} ms", .0.as_millis())]
    Stalled(Duration),
    /// The peer does not speak this protocol.
    #[error("the peer sent a frame that breaks the protocol: {0}")]
    Malformed(String),
}

/// A connected socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Socket,
    /// Longest time without progress inside a frame.
    stall: Duration,
    ahead: BytesMut,
    descriptors: VecDeque<OwnedFd>,
}

impl Wire {
    pub(crate) fn new(socket: Socket, stall: Duration) -> Self {
        Self { socket, stall, ahead: BytesMut::with_capacity(AHEAD_BYTES), descriptors: VecDeque::new() }
    }

    pub(crate) fn is_unix(&self) -> bool {
        matches!(self.socket, Socket::Unix(_))
    }

    /// Whether the peer has not closed the connection, as far as is known here. Asked between two frames only.
    pub(crate) fn is_open(&self) -> bool {
        let socket = match &self.socket {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Unix(socket) => socket.as_fd(),
        };
        let received = rustix::net::recv(socket, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        // What comes between two frames is a last word before it closes.
        matches!(received, Err(rustix::io::Errno::AGAIN))
    }

    /// Reads a frame's header. `idle` bounds the wait for its first byte.
    pub(crate) async fn read_header<T: DeserializeOwned>(&mut self, idle: Duration) -> Result<T, WireError> {
        let mut wait = idle;
        while self.ahead.len() < 4 {
            if self.fill(wait).await? == 0 {
                let cut_off = || WireError::Malformed("it ends inside a header".to_owned());
                return Err(if self.ahead.is_empty() { WireError::Closed } else { cut_off() });
            }
            wait = self.stall;
        }
        let bytes = self.ahead.get_u32_le();
        if bytes > HEADER_BYTES_MAX {
            return Err(WireError::Malformed(format!(
                "a header of {bytes} bytes; at most {HEADER_BYTES_MAX} are allowed"
            )));
        }
        let bytes = bytes as usize;
        let header = if self.ahead.len() >= bytes {
            self.ahead.split_to(bytes)
        } else {
            let mut header = BytesMut::zeroed(bytes);
            self.read_exact(&mut header).await?;
            header
        };
        ballast_schemas::from_messagepack(&header).map_err(|error| WireError::Malformed(error.to_string()))
    }

    async fn fill(&mut self, wait: Duration) -> Result<usize, WireError> {
        let mut piece = [0; 4096];
        let bytes = self.receive(&mut piece, wait).await?;
        self.ahead.extend_from_slice(&piece[..bytes]);
        Ok(bytes)
    }

    /// Fills a buffer with payload.
    pub(crate) async fn read_exact(&mut self, mut buffer: &mut [u8]) -> Result<(), WireError> {
        let ready = self.ahead.len().min(buffer.len());
        self.ahead.copy_to_slice(&mut buffer[..ready]);
        buffer = &mut buffer[ready..];
        while !buffer.is_empty() {
            let bytes = self.receive(buffer, self.stall).await?;
            if bytes == 0 {
                return Err(WireError::Malformed("it ends inside a frame".to_owned()));
            }
            buffer = &mut buffer[bytes..];
        }
        Ok(())
    }

    /// Reads payload that nobody wants.
    pub(crate) async fn skip(&mut self, mut bytes: u64) -> Result<(), WireError> {
        let mut piece = vec![0; bytes.min(AHEAD_BYTES as u64) as usize];
        while bytes > 0 {
            let take = bytes.min(piece.len() as u64) as usize;
            self.read_exact(&mut piece[..take]).await?;
            bytes -= take as u64;
        }
        Ok(())
    }

    /// The descriptors that came with a frame.
    pub(crate) fn take_descriptors(&mut self, count: u32) -> Result<Vec<OwnedFd>, WireError> {
        let count = count as usize;
        if count > self.descriptors.len() {
            let found = self.descriptors.len();
            return Err(WireError::Malformed(format!("{found} descriptors came, its header speaks of {count}")));
        }
        Ok(self.descriptors.drain(..count).collect())
    }

    /// Waits until the peer has closed the connection, which a peer that awaits an answer shows in no other way.
    pub(crate) async fn closed(&self) {
        let peek = |socket: BorrowedFd<'_>| {
            let mut byte = [0];
            let (bytes, _) = rustix::net::recv(socket, &mut byte, RecvFlags::PEEK)?;
            Ok(bytes)
        };
        let peeked = match &self.socket {
            Socket::Tcp(socket) => socket.async_io(Interest::READABLE, || peek(socket.as_fd())).await,
            Socket::Unix(socket) => socket.async_io(Interest::READABLE, || peek(socket.as_fd())).await,
        };
        // A peer that has sent its next request already is still there.
        if matches!(peeked, Ok(1..)) {
            std::future::pending().await
        }
    }

    async fn receive(&mut self, buffer: &mut [u8], wait: Duration) -> Result<usize, WireError> {
        let received = match &mut self.socket {
            Socket::Tcp(socket) => tokio::time::timeout(wait, socket.read(buffer)).await,
            Socket::Unix(socket) => {
                tokio::time::timeout(wait, receive_with_descriptors(socket, buffer, &mut self.descriptors)).await
            }
        };
        received.map_err(|_| WireError::Stalled(wait))?.map_err(WireError::Io)
    }

    /// Writes a frame: header, payload, and descriptors with its first byte.
    pub(crate) async fn write_frame(
        &mut self,
        header: &impl Serialize,
        payload: &[&[u8]],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let mut start = vec![0; 4];
        rmp_serde::encode::write_named(&mut start, header).map_err(|error| WireError::Malformed(error.to_string()))?;
        let bytes = start.len() - 4;
        if bytes > HEADER_BYTES_MAX as usize {
            return Err(WireError::Malformed(format!(
                "a header of {bytes} bytes; at most {HEADER_BYTES_MAX} are allowed"
            )));
        }
        start[..4].copy_from_slice(&(bytes as u32).to_le_bytes());
        let mut sent = 0;
        if !descriptors.is_empty() {
            let Socket::Unix(socket) = &self.socket else {
                return Err(WireError::Malformed("descriptors do not travel over TCP".to_owned()));
            };
            let sending = tokio::time::timeout(self.stall, send_with_descriptors(socket, &start, descriptors)).await;
            sent = sending.map_err(|_| WireError::Stalled(self.stall))?.map_err(WireError::Io)?;
        }
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(payload.len() + 1);
        slices.push(IoSlice::new(&start[sent..]));
        slices.extend(payload.iter().map(|piece| IoSlice::new(piece)));
        self.write_all(&mut slices).await
    }

    async fn write_all(&mut self, mut slices: &mut [IoSlice<'_>]) -> Result<(), WireError> {
        // Takes off empty slices at the front.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let writing = match &mut self.socket {
                Socket::Tcp(socket) => tokio::time::timeout(self.stall, socket.write_vectored(slices)).await,
                Socket::Unix(socket) => tokio::time::timeout(self.stall, socket.write_vectored(slices)).await,
            };
            match writing.map_err(|_| WireError::Stalled(self.stall))?.map_err(WireError::Io)? {
                0 => return Err(WireError::Io(io::ErrorKind::WriteZero.into())),
                bytes => IoSlice::advance_slices(&mut slices, bytes),
            }
        }
        Ok(())
    }
}

async fn receive_with_descriptors(
    socket: &UnixStream,
    buffer: &mut [u8],
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    socket
        .async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut *buffer)];
            let received = rustix::net::recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    descriptors.extend(received);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > DESCRIPTORS_MAX {
                return Err(io::Error::other(format!("more than {DESCRIPTORS_MAX} descriptors, or no room for them")));
            }
            Ok(received.bytes)
        })
        .await
}

async fn send_with_descriptors(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    socket
        .async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(io::Error::other(format!("more than {DESCRIPTORS_MAX} descriptors in one frame")));
            }
            Ok(rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
        })
        .await
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use ballast_schemas::frame::{Request, RequestHeader};

    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    fn pair() -> (Wire, Wire) {
        let (left, right) = UnixStream::pair().unwrap();
        (Wire::new(Socket::Unix(left), STALL), Wire::new(Socket::Unix(right), STALL))
    }

    fn header(payload_bytes: u64, descriptors: u32) -> RequestHeader {
        RequestHeader { payload_bytes, descriptors, body: Request::Describe }
    }

    #[tokio::test]
    async fn frames_arrive_in_order_with_payload_and_descriptors() {
        let (mut left, mut right) = pair();
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("x");
        std::fs::write(&path, b"content").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        left.write_frame(&header(5, 0), &[b"he", b"", b"llo"], &[]).await.unwrap();
        left.write_frame(&header(0, 2), &[], &[file.as_fd(), file.as_fd()]).await.unwrap();
        left.write_frame(&header(1, 0), &[b"!"], &[]).await.unwrap();
        drop(left);

        assert_eq!(right.read_header::<RequestHeader>(STALL).await.unwrap(), header(5, 0));
        let mut payload = [0; 5];
        right.read_exact(&mut payload).await.unwrap();
        assert_eq!(&payload, b"hello");
        assert_eq!(right.read_header::<RequestHeader>(STALL).await.unwrap(), header(0, 2));
        let mut descriptors = right.take_descriptors(2).unwrap();
        let mut text = String::new();
        std::fs::File::from(descriptors.remove(1)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        assert_eq!(right.read_header::<RequestHeader>(STALL).await.unwrap(), header(1, 0));
        right.skip(1).await.unwrap();
        assert!(matches!(right.read_header::<RequestHeader>(STALL).await, Err(WireError::Closed)));
    }

    #[tokio::test]
    async fn what_is_no_frame_is_refused() {
        for bytes in [&[0xff, 0xff, 0xff, 0xff, 0][..], &[3, 0, 0, 0, 1, 2, 3], &[2, 0, 0]] {
            let (mut left, mut right) = pair();
            left.write_all(&mut [IoSlice::new(bytes)]).await.unwrap();
            drop(left);
            let read = right.read_header::<RequestHeader>(STALL).await;
            assert!(matches!(read, Err(WireError::Malformed(_))), "{bytes:?}: {read:?}");
        }
        let (mut left, mut right) = pair();
        left.write_frame(&header(0, 1), &[], &[]).await.unwrap();
        right.read_header::<RequestHeader>(STALL).await.unwrap();
        assert!(right.take_descriptors(1).is_err());
    }

    #[tokio::test]
    async fn a_peer_that_goes_is_noticed_while_nothing_is_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (left, right) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let tcp = [left.unwrap(), right.unwrap().0].map(|socket| Wire::new(Socket::Tcp(socket), STALL));
        for (left, mut right) in [tcp.into(), pair()] {
            let gone =
                async |right: &Wire| tokio::time::timeout(Duration::from_millis(50), right.closed()).await.is_ok();
            assert!(!gone(&right).await);
            let mut left = left;
            left.write_frame(&header(0, 0), &[], &[]).await.unwrap();
            assert!(!gone(&right).await, "what it sent is still to be read");
            right.read_header::<RequestHeader>(STALL).await.unwrap();
            drop(left);
            tokio::time::timeout(STALL, right.closed()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_peer_that_does_not_move_is_given_up() {
        let (_left, mut right) = pair();
        let read = right.read_header::<RequestHeader>(Duration::from_millis(20)).await;
        assert!(matches!(read, Err(WireError::Stalled(_))));
    }
}
